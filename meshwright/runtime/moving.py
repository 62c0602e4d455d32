"""Buffers that forwards move: statistics of norms, vectors of a power iteration, a codebook that follows the data.

A layer that is run again for its backward must find them as they were when it first ran, and leave them as they are now:

    forward     m0 -> m1          m0 is kept with the microbatch
    forward     m1 -> m2          ... of the next one
    recompute   m0 -> (dropped)   on what was kept; the layer has m2 before and after
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""


class Moving:
    """The buffers of some layers; which of them move is seen at the first forward."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self.places: list[Place] = [(m, name) for m in modules for name, _ in m.named_buffers(recurse=False)]
        self._known = False

    def copied(self) -> dict[Place, Tensor]:
        """What moves, as it is now; a buffer that several modules share stays one."""
        once: dict[int, Tensor] = {}
        found = {}
        for module, name in self.places:
            buffer = getattr(module, name)
            found[module, name] = once.setdefault(id(buffer), buffer.clone())
        return found

    def moved(self, before: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
        """What of this a forward has moved; after the first forward nothing else is looked at."""
        if not self._known:
            self._known, self.places = True, [at for at, then in before.items() if not torch.equal(getattr(*at), then)]
        return {at: before[at] for at in self.places}

    @contextmanager
    def as_before(self, before: Mapping[Place, Tensor]) -> Iterator[None]:
        """Let the layers have what they had, and put back what they have."""
        now = {at: getattr(*at) for at in before}
        try:
            for (module, name), then in before.items():
                setattr(module, name, then)
            yield
        finally:
            for (module, name), buffer in now.items():
                setattr(module, name, buffer)
