"""Finds the moves from one layout to another: which axes are gathered, scattered, summed, cut or copied, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.capture.shard.layouts.layout import CannotRegroup, Dim, Factor, Layout, axes_of, bare, marks, refined
from meshwright.capture.shard.layouts.refusals import indivisible
from meshwright.costs.scheme import Grid
from meshwright.errors import MeshwrightError
from meshwright.tensor.moves import Move, MoveKind

Relaid = list[tuple[str, Move | None, tuple[Any, ...]]]
"""Moves in order. An entry without a move is a torch operation with its arguments after the tensor."""


class _Relay:
    """A layout that is changed move by move."""

    def __init__(self, have: Layout, want: Layout, grid: Grid) -> None:
        self.grid = grid
        self.now: list[list[Factor]] = []
        self.goal: list[list[Factor]] = []
        self.crops: dict[int, int] = {}
        for at, (h, w) in enumerate(zip(bare(have, grid), bare(want, grid), strict=True)):
            a, b = self._aligned(at, h, w)
            self.now.append(list(a))
            self.goal.append(list(b))
        self.found: Relaid = []

    def _aligned(self, at: int, have: Dim, want: Dim) -> tuple[Dim, Dim]:
        """Gives both layouts the same factors. If that is not possible, the value is gathered and cut again."""
        if have == want:
            return have, want
        if have[0].real is not None and want[0].real is None and len(have) == 1:
            self.crops[at] = have[0].length
            if axes_of((want,)):
                raise MeshwrightError("a padded dimension is needed with another cut, which is not supported")
            return have, (Factor(have[0].size, (), have[0].real),)
        try:
            a = refined(have, marks(want), self.grid)
            b = refined(want, marks(a), self.grid)
        except CannotRegroup:
            a, b = have, want
        if [f.size for f in a] == [f.size for f in b]:
            return a, b
        return have, want

    def _shape(self, dims: list[list[Factor]]) -> tuple[int, ...]:
        sizes = []
        for dim in dims:
            size = 1
            for factor in dim:
                size *= factor.size // self.grid.size(factor.axes)
            sizes.append(size)
        return tuple(sizes)

    def _sizes(self, dims: list[list[Factor]]) -> tuple[int, ...]:
        return tuple(f.size // self.grid.size(f.axes) for dim in dims for f in dim)

    def change(self, kind: MoveKind, dim: int, factor: int, axis: str, sums: bool = False) -> None:
        """Removes an axis from a factor, or adds it as the innermost."""
        before = [list(d) for d in self.now]
        old = self.now[dim][factor]
        axes = old.axes[:-1] if kind is MoveKind.GATHER else (*old.axes, axis)
        if old.size % self.grid.size(axes):
            raise CannotRegroup(old.size, axes)
        self.now[dim][factor] = Factor(old.size, axes, old.real)
        narrow = before if kind is MoveKind.GATHER else self.now
        place = sum(len(d) for d in self.now[:dim]) + factor
        move = Move(kind, (axis,), self._shape(before), self._shape(self.now), self._sizes(narrow), place, sums)
        self.found.append((str(kind), move, ()))

    def gathers(self, missing: frozenset[str]) -> None:
        """Gathers all axes that are in the wrong place."""
        coming = axes_of(tuple(tuple(d) for d in self.goal))
        for at, (now, goal) in enumerate(zip(self.now, self.goal, strict=True)):
            alike = [f.size for f in now] == [f.size for f in goal]
            for k in range(len(now)):
                kept = _common(now[k].axes, goal[k].axes) if alike else 0
                for axis in reversed(now[k].axes[kept:]):
                    self.change(MoveKind.GATHER, at, k, axis, sums=axis in missing and axis not in coming)
            if not alike:
                self.now[at] = [Factor(f.size, (), f.real) for f in goal]

    def arrivals(self, parts: frozenset[str]) -> frozenset[str]:
        """Adds all missing axes: by a scatter if the value is a partial sum over the axis. Returns the remaining partial axes."""
        left = set(parts)
        steps = [
            (at, k, axis)
            for at, goal in enumerate(self.goal)
            for k, factor in enumerate(goal)
            for axis in factor.axes[len(self.now[at][k].axes) :]
        ]
        for at, k, axis in steps:
            kind = MoveKind.SCATTER if axis in parts else MoveKind.PART
            left.discard(axis)
            self.change(kind, at, k, axis)
        return frozenset(left)


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def relaid(
    have: Layout, want: Layout, grid: Grid, *, missing: frozenset[str] = frozenset(), parts: Iterable[str] = (), name: str = ""
) -> Relaid:
    """Returns the moves from one layout to another.

    Over the axes `missing` the reader's work is cut but the value is whole, so its gradient is a partial sum. Over `parts` the
    value itself is a partial sum.
    """
    relay = _Relay(have, want, grid)
    gathered = axes_of(bare(have, grid)) - axes_of(bare(want, grid))
    try:
        relay.gathers(missing)
        left = relay.arrivals(frozenset(parts))
    except CannotRegroup as error:
        raise indivisible(name, error.size, error.axes, grid) from error
    shape = relay._shape(relay.now)
    if left:
        relay.found.append(("total", Move(MoveKind.TOTAL, grid.wide(left), shape, shape), ()))
    for dim, real in relay.crops.items():
        relay.found.append(("aten.narrow.default", None, (dim, 0, real)))
        relay.found.append(("aten.clone.default", None, ()))  # so that the whole tensor can be dropped
        shape = (*shape[:dim], real, *shape[dim + 1 :])
    if copied := missing - gathered:
        relay.found.append(("copy", Move(MoveKind.COPY, grid.wide(copied), shape, shape), ()))
    return relay.found
