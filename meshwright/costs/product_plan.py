"""How a product runs in any mode: gather x, gather W, multiply, reduce y. The spreads of x and y decide which axes take part.

All modes follow one rule:

    gather x       on axes that cut the rows of x but not those of y, or its features but not the input of W
    gather W       on axes that cut W more than the local product needs
    reduce y       on axes that cut the inner dimension, where the local product is a partial sum: it is scattered onto the rows
                   of y, or summed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.costs.scheme import Axes, MatrixAxes, Spread

Where = Literal["rows", "sequence", "features"]
Side = Literal["out", "into"]


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """The moves around a local product, axis by axis."""

    input_gathers: tuple[tuple[Where, str], ...]
    weight_gathers: tuple[tuple[Side, str], ...]
    scatters: tuple[tuple[Where, str], ...]
    total: Axes
    copy: Axes
    """Axes over which x is whole and its gradient is a partial sum, which the backward reduces."""
    rows: Axes
    """Axes that cut the rows of the local product. Over these a weight gradient is a partial sum."""
    outputs: Axes
    """Axes that cut the output features."""
    unsummed: Axes
    """Axes over which the gradient of the stored weight stays a partial sum until gradients are reduced."""


def product_plan(have: Spread, want: Spread, weight: MatrixAxes) -> ProductPlan:
    """Returns the moves of a product that reads the spread `have` and writes the spread `want`."""
    kept = tuple(axis for axis in (*have.rows, *have.sequence) if axis in (*want.rows, *want.sequence))
    gathers: list[tuple[Where, str]] = [("rows", axis) for axis in reversed(have.rows) if axis not in kept]
    gathers += [("sequence", axis) for axis in reversed(have.sequence) if axis not in kept]
    gathers += [("features", axis) for axis in reversed(have.features) if axis not in weight.into]
    inner = tuple(axis for axis in have.features if axis in weight.into)
    weights: list[tuple[Side, str]] = [("out", axis) for axis in reversed(weight.out) if axis not in want.features]
    weights += [("into", axis) for axis in reversed(weight.into) if axis not in inner]
    scatters: list[tuple[Where, str]] = [("rows", axis) for axis in want.rows if axis in inner]
    scatters += [("sequence", axis) for axis in want.sequence if axis in inner]
    scattered, gathered = {axis for _, axis in scatters}, {axis for _, axis in gathers}
    known = {*have.rows, *have.sequence, *have.features}
    return ProductPlan(
        input_gathers=tuple(gathers),
        weight_gathers=tuple(weights),
        scatters=tuple(scatters),
        total=tuple(axis for axis in inner if axis not in scattered),
        copy=tuple(axis for axis in want.features if axis not in gathered and axis not in known),
        rows=kept,
        outputs=want.features,
        unsummed=tuple(axis for axis in kept if axis not in {a for _, a in weights} and axis not in (*weight.out, *weight.into)),
    )
