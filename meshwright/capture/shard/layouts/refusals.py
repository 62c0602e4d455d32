"""Errors of sharding: a size that does not divide, an operation without a rule."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.capture.trace.graph import Node
from meshwright.costs.scheme import Grid
from meshwright.errors import MeshwrightError


class NoRuleError(MeshwrightError):
    """An operation has no rule for its arguments."""


class MisfitError(MeshwrightError):
    """The shape of a step would differ from its layout."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"the rule for {node} does not fit: {why}")
        self.node, self.why = node, why


class SharedParameterError(MeshwrightError):
    """A parameter is read in two layouts, or by operations that are cut in different ways."""

    def __init__(self, parameter: str) -> None:
        super().__init__(
            f"{parameter} is read in two layouts, by work that is cut differently",
            fix=f"replicate=[{parameter.rpartition('.')[0]!r}], or another tensor mode",
        )
        self.parameter = parameter


def indivisible(what: str, size: int, axes: Iterable[str], grid: Grid) -> MeshwrightError:
    """Returns the error for a size that does not divide, with the divisor and the nearest size that divides."""
    axes = grid.wide(axes)
    parts = grid.size(axes)
    nearest = max(1, (size + parts // 2) // parts) * parts
    names = ", ".join(f"{axis}={grid.size((axis,))}" for axis in axes)
    return MeshwrightError(
        f"{what}: size {size} does not divide by {parts} ({names}) on the {grid}",
        fix=f"size {nearest}, or a grid that divides {size}",
    )


def no_rule(node: Node, why: str = "") -> NoRuleError:
    """Returns the error for an operation without a rule, with its name and its module."""
    return NoRuleError(
        f"no rule of a tensor mode for {node.target} in {node.path or 'the model'}{': ' + why if why else ''}",
        fix=f"replicate=[{node.path!r}]: it then runs whole on every rank",
    )
