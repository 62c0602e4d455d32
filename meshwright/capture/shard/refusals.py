"""Errors of sharding: a size that does not divide, an operation without a rule."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.capture.trace.graph import Node
from meshwright.costs.scheme import Grid
from meshwright.errors import MeshwrightError


def indivisible(what: str, size: int, axes: Iterable[str], grid: Grid) -> MeshwrightError:
    """The error for a size that does not divide: what it is, by what it must divide, and the nearest size that does."""
    axes = grid.wide(axes)
    parts = grid.size(axes)
    nearest = max(1, (size + parts // 2) // parts) * parts
    names = ", ".join(f"{axis}={grid.size((axis,))}" for axis in axes)
    return MeshwrightError(
        f"{what}: size {size} does not divide by {parts} ({names}) on the {grid}",
        fix=f"size {nearest}, or a grid that divides {size}",
    )


def no_rule(node: Node, why: str = "") -> MeshwrightError:
    """The error for an operation that has no rule, by its name and its module."""
    return MeshwrightError(
        f"no rule of a tensor mode for {node.target} in {node.path or 'the model'}{': ' + why if why else ''}",
        fix=f"replicate=[{node.path!r}]: it then runs whole on every rank",
    )
