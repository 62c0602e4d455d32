"""The vocabulary of tensor modes: a grid of ranks with named axes, and a scheme: which axes cut which dimensions.

A *spread* lists the axes that cut the rows, the sequence and the features of an activation. *Matrix axes* list those that cut
the output and the input dimension of a weight, which is stored as in torch: (out, in). If several axes cut a dimension, they
nest, and the first is the outermost. The residual stream has one spread. The activations between two products (attention heads,
the wide part of an MLP) have another, the inner spread. A product expands if it reads the residual spread, and contracts if it
reads the inner spread.
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
    """The tensors that a product keeps from forward to backward."""

    SHARDS = "shards"  # its own part of the input and of the weight; both are gathered again
    GATHERED = "gathered"  # the gathered input and weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """The sizes that a user asks for: a number of ranks, a box, a depth, and whether the sequence is cut."""

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
        """The number of ranks."""
        return math.prod(size for _, size in self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """Returns the number of parts that some axes cut a dimension into."""
        known = dict(self.sizes)
        return math.prod(known[axis] for axis in axes)

    def wide(self, axes: Iterable[str]) -> Axes:
        """Returns the axes with more than one rank, in the order of the grid."""
        wanted = set(axes)
        return tuple(name for name, size in self.sizes if name in wanted and size > 1)

    def at(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank."""
        found: dict[str, int] = {}
        for name, size in reversed(self.sizes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}

    def rank(self, at: Mapping[str, int]) -> int:
        """Returns the rank at these coordinates."""
        found = 0
        for name, size in self.sizes:
            found = found * size + at[name]
        return found

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from a rank only in these axes, in order."""
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
    """Which axes of a mode cut which dimensions."""

    residual: Spread
    inner: Spread
    expand: MatrixAxes
    contract: MatrixAxes
    table: MatrixAxes
    save: Save = Save.SHARDS
    movable: Axes = ()
    """Axes of the residual's rows that cut its sequence instead where there are too few rows."""

    def along_sequence(self) -> Scheme:
        """Returns the same scheme with the movable axes on the sequence."""
        rows = tuple(axis for axis in self.residual.rows if axis not in self.movable)
        return replace(self, residual=replace(self.residual, rows=rows, sequence=self.movable))


@dataclass(frozen=True, slots=True)
class Words:
    """Words that one rank sends: forward, backward, and in the reduction of weight gradients."""

    forward: Fraction = Fraction(0)
    backward: Fraction = Fraction(0)
    sync: Fraction = Fraction(0)
    forward_steps: int = 0
    backward_steps: int = 0


def whole_root(ranks: int, *, mode: str, depth: int = 1) -> int:
    """Returns the side of a square grid, of which there are `depth`. Raises if the number of its ranks is not a square."""
    side = math.isqrt(ranks)
    if side * side != ranks:
        tried = " or ".join(f"tp={fits}" for fits in (depth * side**2, depth * (side + 1) ** 2) if fits > 1)
        raise MeshwrightError(f"{mode} needs a square number of ranks, got {ranks}", fix=f"{tried}, or a box of {depth * ranks}")
    return side


def positive(ranks: int | None, *, mode: str) -> int:
    """Returns the number of ranks. Raises if it was not given."""
    if ranks is None or ranks < 1:
        raise MeshwrightError(f"{mode} needs at least one rank, got tp={ranks}", fix="tp=2")
    return ranks
