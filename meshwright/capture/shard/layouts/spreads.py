"""Converts spreads and padding to layouts of values."""

from __future__ import annotations

from meshwright.capture.shard.layouts.layout import Dim, Factor, Layout, axes_of, whole
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.costs.scheme import Axes, Spread


def spread_layout(walk: ShardWalk, name: str, spread: Spread, last: Dim) -> Layout:
    """Returns the layout of a value whose rows, sequence and features are cut as in a spread; the last dimension is given."""
    shape, grows = walk.shape(name), walk.sizes.grows.get(name)
    found: list[Dim] = [*whole(shape[:-1]), last]
    if grows is None or grows >= len(shape) - 1:
        return tuple(found)
    rows, size = walk.sizes.rows, shape[grows]
    if size == rows:
        found[grows] = (Factor(rows, spread.rows),)
        others = [k for k in range(len(shape) - 1) if k != grows]
        if others and shape[others[0]] > 1:
            found[others[0]] = (Factor(shape[others[0]], spread.sequence),)
    elif size % rows == 0:
        found[grows] = (Factor(rows, spread.rows), Factor(size // rows, spread.sequence))
    return tuple(found)


def present(layout: Layout, spread: Spread) -> Spread:
    """Returns a spread without the axes that a layout does not have."""
    there = axes_of(layout)
    rows, sequence = (tuple(axis for axis in axes if axis in there) for axes in (spread.rows, spread.sequence))
    return Spread(rows, sequence, spread.features)


def padded(walk: ShardWalk, size: int, axes: Axes) -> Factor:
    """Returns a factor that is padded to a size that divides."""
    parts = walk.grid.size(axes)
    full = -(-size // parts) * parts
    return Factor(full, axes, size if full != size else None)


def only(dim: Dim, axes: Axes) -> Dim:
    """Returns a dimension that only these of its axes cut."""
    return tuple(Factor(f.size, tuple(axis for axis in f.axes if axis in axes), f.real) for f in dim)
