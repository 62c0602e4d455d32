"""Parameters of a unit that another worker owns (cyclic ZeRO). On this rank they have memory only while an action uses them.

A message brings them as flat tensors, one for each dtype. `open` copies these into the storage that the leaves of a version view,
and `close` frees that storage. The graph of a forward holds views of it, so the backward fills the same storage again.

A leaf has the order of strides of its parameter (transposed, channels_last), because the order changes the last bits of results.
A message has the order of the shape, so that ranks may have different strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.runtime.parameters.absent import hide, show
from meshwright.runtime.parameters.zero_shares import flat_plans, views_of


class Borrowed:
    """The versions of one unit that are in use on this rank."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        """Frees the parameters. Until they are shown, they keep their shape and read as NaN."""
        self.params, self.plans = params, flat_plans(params, 1)
        self._strides = [torch.empty_like(p, device="meta").stride() for p in params]
        self._is_plain = all(torch.empty_like(p, device="meta").is_contiguous() for p in params)
        self.leaves: dict[int, list[Tensor]] = {}
        self._flats: dict[int, list[Tensor]] = {}
        self.hide()

    def room(self) -> list[Tensor]:
        """Returns new flat tensors for the parameters."""
        return [torch.empty(plan.width, dtype=plan.dtype, device=self.params[0].device) for plan in self.plans]

    def open(self, version: int, brought: Sequence[Tensor]) -> None:
        """Gives the leaves of a version memory, filled from a message. Does nothing if they have it."""
        if version not in self.leaves:
            flats = self._flats[version] = self.room()
            self.leaves[version] = [view.data.requires_grad_() for view in self._strided(flats)]
        elif self.nbytes(version):
            return
        for flat in self._flats[version]:
            if not flat.untyped_storage().nbytes():  # resize_ moves memory, even to the same size
                flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        if self._is_plain:
            into: Sequence[Tensor] = self._flats[version]
        else:
            into, brought = self._strided(self._flats[version]), views_of(self.plans, brought, self.params)
        for mine, new in zip(into, brought, strict=True):
            mine.copy_(new)

    def _strided(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Returns the part of each parameter in flat tensors, with its shape and its order of strides."""
        views = views_of(self.plans, flats, self.params)
        if self._is_plain:
            return views
        return [v.as_strided(v.shape, strides, v.storage_offset()) for v, strides in zip(views, self._strides, strict=True)]

    def close(self, version: int) -> None:
        """Frees the memory of a version. Its leaves stay, for a graph that needs them again."""
        for flat in self._flats[version]:
            flat.untyped_storage().resize_(0)

    def drop(self, version: int) -> None:
        """Drops a version that no later instruction reads."""
        del self.leaves[version], self._flats[version]

    def show(self, version: int) -> None:
        """Makes the parameters those of an open version."""
        for parameter, leaf in zip(self.params, self.leaves[version], strict=True):
            show(parameter)
            parameter.data = leaf.data

    def hide(self) -> None:
        """Makes the parameters read as NaN, without memory."""
        for parameter in self.params:
            hide(parameter)

    def make_room(self) -> None:
        """Gives the parameters memory of their own, for good. Their values are not set."""
        for parameter, strides in zip(self.params, self._strides, strict=True):
            show(parameter)
            parameter.data = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=parameter.device)

    def nbytes(self, version: int | None = None) -> int:
        """Returns the memory of a version, or of all versions."""
        flats = self._flats.get(version, ()) if version is not None else [flat for of in self._flats.values() for flat in of]
        return sum(flat.untyped_storage().nbytes() for flat in flats)
