"""Buffers that a forward changes: statistics of norms, vectors of a power iteration, a codebook that follows the data.

When a layer is recomputed, it must see its buffers as they were in its first forward, and then get the current values back:

    forward     m0 -> m1          m0 is saved with the microbatch
    forward     m1 -> m2          m1 is saved with the next microbatch
    recompute   m0 -> (dropped)   runs on the saved m0; the layer has m2 before and after

The values that a stage sends must not change during the send either.
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
"""Buffers up to this size are saved with every microbatch. For larger ones, the first forward shows whether they change."""


class Moving:
    """The buffers of layers that are recomputed."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self.places: list[Place] = [(m, name) for m in modules for name, _ in m.named_buffers(recurse=False)]
        self._all = tuple(self.places)
        self._still: dict[Place, tuple[Tensor, int]] | None = None

    def copied(self) -> dict[Place, Tensor]:
        """Returns copies of the buffers that may change. Modules that share a buffer share its copy."""
        once: dict[int, Tensor] = {}
        found = {}
        for module, name in self.places:
            buffer = getattr(module, name)
            found[module, name] = once.setdefault(id(buffer), buffer.clone())
        return found

    def moved(self, before: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
        """Returns the part of `before` that a forward may have changed.

        Raises if a buffer changed that did not change in the first forward.
        """
        if self._still is None:
            large = [at for at, then in before.items() if then.nbytes > SMALL_BYTES]
            found = [at for at in large if torch.equal(getattr(*at), before[at])]
            self._still = {at: (getattr(*at), write_count(getattr(*at))) for at in found}
            self.places = [at for at in self.places if at not in self._still]
        for (module, name), (buffer, version) in self._still.items():
            if (now := getattr(module, name)) is not buffer or write_count(now) != version:
                raise MeshwrightError(
                    f"buffer {name!r} of a {type(module).__name__} did not change in its first forward and does now: "
                    "its old value was not saved",
                    fix="turn recompute off for the stage of this layer",
                )
        return {at: before[at] for at in self.places}

    @contextmanager
    def as_before(self, before: Mapping[Place, Tensor]) -> Iterator[None]:
        """Sets the saved buffers in the layers, and restores the current ones at the end."""
        now = {at: getattr(*at) for at in before}
        try:
            for (module, name), then in before.items():
                setattr(module, name, then)
            yield
        finally:
            for (module, name), buffer in now.items():
                setattr(module, name, buffer)

    def apart(self, values: Sequence[Tensor], *, graph: bool) -> tuple[Tensor, ...]:
        """Returns values to send, without their graph. Copies those that a layer may change later (no gradient, or a buffer)."""
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
    """Returns the error for a layer that must be recomputed but has changed its input."""
    return MeshwrightError(
        f"layer {layer} or one after it changes its input in place for some data but not in its first forward, "
        "so it cannot be recomputed",
        fix="set the class attribute `inplace = True` on that layer, or turn recompute off for its stage",
    )
