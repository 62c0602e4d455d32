"""What layers count of the data they see: batch norms and their like must count a microbatch once, recomputed or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Layers that keep statistics of what they saw."""


@contextmanager
def uncounted(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let statistics stand still: a momentum of zero, and the counter set back; captured layers have parts that know how."""
    counts: list[Any] = [m for layer in layers for m in layer.modules() if hasattr(m, "still")]
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, NORMS) and m.track_running_stats]
    before = [(m, m.momentum, None if m.num_batches_tracked is None else m.num_batches_tracked.clone()) for m in norms]
    try:
        for m in norms:
            m.momentum = 0.0
        for m in counts:
            m.still = True
        yield
    finally:
        for m in counts:
            m.still = False
        for m, momentum, count in before:
            m.momentum = momentum
            if count is not None and m.num_batches_tracked is not None:
                m.num_batches_tracked.copy_(count)
