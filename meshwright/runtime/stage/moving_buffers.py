"""Buffers that forwards move: statistics of norms, vectors of a power iteration, a codebook that follows the data.

A layer that is run again for its backward must find them as they were when it first ran, and leave them as they are now:

    forward     m0 -> m1          m0 is kept with the microbatch
    forward     m1 -> m2          ... of the next one
    recompute   m0 -> (dropped)   on what was kept; the layer has m2 before and after

What a stage hands on must not move either while it is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.torch_internals import write_count

Place = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""

SMALL_BYTES = 1 << 16
"""Buffers up to this size are kept with every microbatch; of larger ones it is seen at the first forward which move."""


class Moving:
    """The buffers of layers that are run again."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self.places: list[Place] = [(m, name) for m in modules for name, _ in m.named_buffers(recurse=False)]
        self._all = tuple(self.places)
        self._still: dict[Place, tuple[Tensor, int]] | None = None

    def copied(self) -> dict[Place, Tensor]:
        """What moves, as it is now; a buffer that several modules share stays one."""
        once: dict[int, Tensor] = {}
        found = {}
        for module, name in self.places:
            buffer = getattr(module, name)
            found[module, name] = once.setdefault(id(buffer), buffer.clone())
        return found

    def moved(self, before: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
        """What of this a forward may have moved; what was found still must stay so."""
        if self._still is None:
            large = [at for at, then in before.items() if then.nbytes > SMALL_BYTES]
            found = [at for at in large if torch.equal(getattr(*at), before[at])]
            self._still = {at: (getattr(*at), write_count(getattr(*at))) for at in found}
            self.places = [at for at in self.places if at not in self._still]
        for (module, name), (buffer, version) in self._still.items():
            if (now := getattr(module, name)) is not buffer or write_count(now) != version:
                raise MeshwrightError(
                    f"buffer {name!r} of a {type(module).__name__} did not move in its first forward and does now: "
                    "what it was is not kept",
                    fix="a stage without recompute for this layer",
                )
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

    def apart(self, values: Sequence[Tensor], *, graph: bool) -> tuple[Tensor, ...]:
        """What is handed on, without its graph; what a layer may keep and change (no gradient, or a buffer) as a copy."""
        if graph:
            kept = [not value.requires_grad for value in values]
        else:
            buffers = {getattr(*at).untyped_storage().data_ptr() for at in self._all}
            kept = [value.untyped_storage().data_ptr() in buffers for value in values]
        plain = torch.contiguous_format
        return tuple(
            t.detach().clone(memory_format=plain) if copied else t.detach().contiguous()
            for t, copied in zip(values, kept, strict=True)
        )


def changed_late(layer: int) -> MeshwrightError:
    """What to say where a layer is to run again and has changed what it was given."""
    return MeshwrightError(
        f"layer {layer} or one after it changes its input in place for some data and did not at first: it cannot be run again",
        fix="a class attribute `inplace = True` on that layer, or a stage without recompute",
    )
