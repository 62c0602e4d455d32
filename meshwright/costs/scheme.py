"""The words of tensor modes: a grid of ranks with named axes, and the scheme that says which axes cut what.

A *spread* says which axes cut the rows, the sequence and the features of an activation; *matrix axes* say which cut the
output and the input dimension of a weight, stored as torch has it: (out, in). Several axes nest, the first is the outermost.
The residual stream has one spread and the part between two products (attention heads, the wide part of an MLP) another.
A product that reads the residual spread expands, one that reads the inner spread contracts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from meshwright.errors import MeshwrightError

Axes = tuple[str, ...]


class Save(StrEnum):
    """What a product keeps from forward to backward."""

    SHARDS = "shards"  # its own part of the input and of the weight; both are gathered again
    GATHERED = "gathered"  # the gathered input and weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """What a user asks of a mode: so many ranks, or a box, a depth, and a cut sequence."""

    tp: int | None = None
    box: tuple[int, int, int] | None = None
    depth: int = 1
    sequence: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of one worker, by coordinates on named axes; the last axis is the innermost."""

    mode: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def axes(self) -> Axes:
        """The names of the axes."""
        return tuple(name for name, _ in self.sizes)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """How many parts some axes cut something into."""
        known = dict(self.sizes)
        return math.prod(known[axis] for axis in axes)

    def wide(self, axes: Iterable[str]) -> Axes:
        """Those of some axes that cut at all, in the order of the grid."""
        wanted = set(axes)
        return tuple(name for name, size in self.sizes if name in wanted and size > 1)

    def at(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank."""
        found: dict[str, int] = {}
        for name, size in reversed(self.sizes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}

    def rank(self, at: Mapping[str, int]) -> int:
        """The rank at some coordinates."""
        found = 0
        for name, size in self.sizes:
            found = found * size + at[name]
        return found

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from one only in these axes, in order."""
        at, found = self.at(rank), [self.at(rank)]
        for axis in axes:
            found = [{**place, axis: k} for place in found for k in range(dict(self.sizes)[axis])]
        assert at in found
        return tuple(self.rank(place) for place in found)

    def __str__(self) -> str:
        return f"{self.mode} " + " x ".join(f"{name}={size}" for name, size in self.sizes)


@dataclass(frozen=True, slots=True)
class Spread:
    """The axes that cut an activation."""

    rows: Axes = ()
    sequence: Axes = ()
    features: Axes = ()


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """The axes that cut a weight, stored as (out, in)."""

    out: Axes = ()
    into: Axes = ()


@dataclass(frozen=True, slots=True)
class Scheme:
    """Which axes of a mode cut what."""

    residual: Spread
    inner: Spread
    expand: MatrixAxes
    contract: MatrixAxes
    table: MatrixAxes
    save: Save = Save.SHARDS
    movable: Axes = ()
    """Axes of the residual's rows that cut its sequence instead where there are too few rows."""

    def along_sequence(self) -> Scheme:
        """The same scheme with the movable axes on the sequence."""
        rows = tuple(axis for axis in self.residual.rows if axis not in self.movable)
        return replace(self, residual=replace(self.residual, rows=rows, sequence=self.movable))


@dataclass(frozen=True, slots=True)
class Words:
    """Words that one rank sends, forward, backward, and when gradients are added up."""

    forward: Fraction = Fraction(0)
    backward: Fraction = Fraction(0)
    sync: Fraction = Fraction(0)
    forward_steps: int = 0
    backward_steps: int = 0


def whole_root(ranks: int, *, mode: str) -> int:
    """The side of a square grid; refuses a number that is no square."""
    side = math.isqrt(ranks)
    if side * side != ranks:
        raise MeshwrightError(
            f"{mode} needs a square number of ranks, got {ranks}",
            fix=f"tp={side * side} or tp={(side + 1) ** 2}, or a box of {ranks}",
        )
    return side


def positive(ranks: int | None, *, mode: str) -> int:
    """A number of ranks that was asked for."""
    if ranks is None or ranks < 1:
        raise MeshwrightError(f"{mode} needs the number of its ranks, got tp={ranks}", fix="tp=2")
    return ranks
