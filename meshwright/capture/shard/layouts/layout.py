"""Layouts: the factors (size, axes) of every dimension of a tensor, the outermost first.

A factor that some axes cut consists of n equal blocks, of which a rank holds one. Views regroup factors: a merged dimension of
rows and positions is ((8, (w,)), (12, ())), fused QKV is ((3, ()), (768, (a,))). Sizes are those of one batch, so that every
regrouping is exact. A factor may be padded: `real` is its size without padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.costs.scheme import Axes, Grid


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a dimension, and the axes that cut it."""

    size: int
    axes: Axes = ()
    real: int | None = None

    @property
    def length(self) -> int:
        """The size without padding."""
        return self.size if self.real is None else self.real


Dim = tuple[Factor, ...]
Layout = tuple[Dim, ...]


class CannotRegroup(Exception):
    """Raised if a view splits a cut dimension at a place other than the border of a block."""

    def __init__(self, size: int, axes: Axes) -> None:
        super().__init__(size, axes)
        self.size, self.axes = size, axes


def whole(shape: Iterable[int]) -> Layout:
    """Returns a layout without cuts."""
    return tuple((Factor(size),) for size in shape)


def axes_of(layout: Iterable[Dim]) -> frozenset[str]:
    """Returns the axes that cut a dimension."""
    return frozenset(axis for dim in layout for factor in dim for axis in factor.axes)


def length(dim: Dim) -> int:
    """Returns the size of a dimension in the whole tensor, without padding."""
    return math.prod(factor.length for factor in dim)


def local(dim: Dim, grid: Grid) -> int:
    """Returns the size of a dimension on a rank."""
    return math.prod(factor.size // grid.size(factor.axes) for factor in dim)


def local_shape(layout: Layout, grid: Grid) -> tuple[int, ...]:
    """Returns the shape on a rank."""
    return tuple(local(dim, grid) for dim in layout)


def joined(dim: Iterable[Factor]) -> Dim:
    """Returns the same dimension with as few factors as possible: an uncut factor joins the one before it."""
    found: list[Factor] = []
    for factor in dim:
        if factor.size == 1 and not factor.axes:
            continue
        if found and not factor.axes and factor.real is None and found[-1].real is None:
            found[-1] = Factor(found[-1].size * factor.size, found[-1].axes)
        else:
            found.append(factor)
    return tuple(found) or (Factor(1),)


def bare(layout: Layout, grid: Grid) -> Layout:
    """Returns a layout without axes of size 1, so that equal distributions compare equal."""
    return tuple(joined(Factor(f.size, tuple(a for a in f.axes if grid.size((a,)) > 1), f.real) for f in dim) for dim in layout)


def split_factor(factor: Factor, take: int, grid: Grid) -> tuple[Factor, Factor]:
    """Splits a factor in two, the outer one with this size. The split must be between blocks."""
    if factor.size % take or factor.real is not None:
        raise CannotRegroup(take, factor.axes)
    outer: list[str] = []
    for k, axis in enumerate(factor.axes):
        if take % grid.size((*outer, axis)) == 0:
            outer.append(axis)
            continue
        rest = factor.axes[k:]
        if grid.size(outer) != take or (factor.size // take) % grid.size(rest):
            raise CannotRegroup(take, factor.axes)
        return Factor(take, tuple(outer)), Factor(factor.size // take, rest)
    return Factor(take, tuple(outer)), Factor(factor.size // take)


def regrouped(layout: Layout, shape: Sequence[int], grid: Grid) -> Layout:
    """Returns the layout of a view with this shape."""
    if 0 in shape:
        return whole(shape)  # an empty tensor
    todo = [factor for factor in joined(factor for dim in layout for factor in dim) if factor.size != 1 or factor.axes]
    found: list[Dim] = []
    for size in shape:
        dim: list[Factor] = []
        have = 1
        while have < size:
            if not todo:
                raise CannotRegroup(size, ())
            factor = todo.pop(0)
            if factor.size == 1:
                continue
            if size % (have * factor.length) == 0:
                dim.append(factor)
                have *= factor.length
                continue
            if size % have:
                raise CannotRegroup(size, factor.axes)
            first, second = split_factor(factor, size // have, grid)
            dim.append(first)
            todo.insert(0, second)
            have = size
        found.append(joined(dim))
    if left := [factor for factor in todo if factor.size > 1]:  # padding of a dimension that is removed
        raise CannotRegroup(left[0].size, left[0].axes)
    return tuple(found)


def refined(dim: Dim, marks: set[int], grid: Grid) -> Dim:
    """Splits the factors of a dimension where the product of the factors after the split is one of these numbers."""
    found: list[Factor] = []
    behind = math.prod(factor.size for factor in dim)
    for factor in dim:
        rest = factor
        behind //= factor.size
        for mark in sorted((m for m in marks if m % behind == 0 and 1 < m // behind < rest.size), reverse=True):
            inner = mark // behind
            if rest.size % inner == 0 and inner < rest.size:
                first, rest = split_factor(rest, rest.size // inner, grid)
                found.append(first)
        found.append(rest)
    return tuple(found)


def marks(dim: Dim) -> set[int]:
    """Returns for each factor the product of the factors after it."""
    found, behind = set[int](), 1
    for factor in reversed(dim):
        found.add(behind)
        behind *= factor.size
    return found


def text(layout: Layout) -> str:
    """Returns a layout as text: [8:w>a, 12, 32:b]."""
    dims = []
    for dim in layout:
        dims.append("*".join(f"{f.length}:{'>'.join(f.axes)}" if f.axes else str(f.length) for f in dim))
    return f"[{', '.join(dims)}]"
