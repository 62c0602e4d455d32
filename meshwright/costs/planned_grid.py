"""The tensor mode of a plan: its grid and its scheme."""

from __future__ import annotations

from math import lcm
from typing import cast

from meshwright.costs.modes import mode
from meshwright.costs.scheme import Grid, Save, Scheme, TensorRequest
from meshwright.ir.plan.plan import Parallel


def planned_grid(plan: Parallel) -> Grid | None:
    """Returns the ranks that share the tensors of one worker; None if a worker is one rank.

    Raises:
        MeshwrightError: The mode does not exist, or its sizes do not form its grid.
    """
    if plan.tp == 1:
        return None
    box = cast(tuple[int, int, int], plan.box) if plan.box else None
    return mode(plan.tensor).grid(TensorRequest(tp=plan.tp, box=box, depth=plan.depth, sequence=plan.sequence))


def planned_scheme(plan: Parallel, grid: Grid) -> Scheme:
    """Returns which axes of the grid cut which dimensions under this plan."""
    return mode(plan.tensor).scheme(grid, save=Save(plan.save))


def row_unit(plan: Parallel) -> int:
    """Returns the number that the rows of a microbatch must be a multiple of under this plan."""
    grid = planned_grid(plan)
    if grid is None:
        return 1
    scheme = planned_scheme(plan, grid)
    fixed = [axis for axis in scheme.residual.rows if axis not in scheme.movable]
    return lcm(grid.size(fixed), grid.size(scheme.inner.rows))
