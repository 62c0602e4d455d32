"""Changes constant tensors during a check, because equal values hide differences.

Examples are a gate that starts at zero and a running average that was never updated. While a model is checked, parameters and
buffers whose elements are all equal get different values near the original.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SAMPLE = 64
"""How many elements are compared before the whole tensor is."""


@contextmanager
def stirred(model: nn.Module) -> Iterator[None]:
    """Give constant tensors other values, and restore them at the end."""
    every = dict.fromkeys((*model.parameters(), *model.buffers()))
    kept = {t: t.detach().clone() for t in every if _is_constant(t)}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for tensor, values in kept.items():
                noise = torch.rand(tensor.shape, generator=generator).to(tensor)
                tensor.copy_(values * (0.9 + 0.2 * noise) if values.flatten()[0].abs() >= 0.1 else values + 0.05 + 0.1 * noise)
        yield
    finally:
        with torch.no_grad():
            for tensor, values in kept.items():
                tensor.copy_(values)


def _is_constant(tensor: Tensor) -> bool:
    """True for a floating-point tensor whose elements are all equal."""
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return False
    values = tensor.detach().flatten()
    return bool((values[:_SAMPLE] == values[0]).all()) and bool((values == values[0]).all())
