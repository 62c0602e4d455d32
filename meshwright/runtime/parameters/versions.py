"""The versions of a unit's parameters in a schedule without a flush, as leaves on the storage of each version.

Between two walks a unit keeps its newest version, and the one before it if forwards of the next walk read it. Before the first
update both have the same values and the same storage: the older one is read only before the first update of a walk.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Versions:
    """A walk starts with version `first`, and with the one before it if the unit is read `late`."""

    def __init__(self, params: Sequence[nn.Parameter], *, first: int = 0, late: bool = False) -> None:
        self.params, self.first, self.late = params, first, late
        self.leaves: dict[int, list[Tensor]] = {}
        self.restart()

    def add(self, version: int) -> None:
        """Adds a version: the parameters as they are now."""
        self.leaves[version] = _fresh(self.params)

    def drop(self, version: int) -> None:
        """Drops a version that no later instruction reads."""
        del self.leaves[version]

    def rebase(self) -> None:
        """At the end of a walk, makes the newest version the first of the next walk."""
        newest = max(self.leaves)
        kept = (newest - 1, newest) if self.late else (newest,)
        self.leaves = {version - newest + self.first: self.leaves[version] for version in kept}

    def restart(self, previous: Sequence[Tensor] | None = None) -> None:
        """Makes the parameters the first version of the next walk. Without `previous` the version before it is the same."""
        self.leaves = {self.first: _fresh(self.params)}
        if self.late:
            self.leaves[self.first - 1] = _fresh(self.params if previous is None else previous)

    def take_over(self) -> None:
        """Between two walks, after `parameter.data = ...`: makes this the newest version, and before the first update both."""
        newest = self.leaves[self.first]
        older = self.leaves[self.first - 1] if self.late else newest
        for i, parameter in enumerate(self.params):
            if parameter.data_ptr() != newest[i].data_ptr():
                is_first = older[i].data_ptr() == newest[i].data_ptr()
                (newest[i],) = _fresh([parameter])
                if is_first:
                    (older[i],) = _fresh([parameter])

    @property
    def previous(self) -> list[Tensor]:
        """Between two walks: the version before the newest, which the next walk reads; empty if it does not."""
        return [leaf.detach() for leaf in self.leaves[self.first - 1]] if self.late else []


def _fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns leaves on the storage of some tensors.

    Each has its own version counter, so autograd does not count a later update in place as a write to it.
    """
    return [t.data.requires_grad_() for t in tensors]
