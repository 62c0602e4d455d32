"""Converts the `Plan` of a planner to a `Parallel` that runs: its cuts, widths and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost


def runnable(plan: Plan, *, schedule: str = "listed", order: Schedule | None = None, costs: Sequence[StageCost] = ()) -> Parallel:
    """Convert a planner's plan to a `Parallel` that can run.

    Stages begin at the plan's layers, and worker w runs on the plan's device for it. If the plan has its own keywords of
    `Parallel`, these are used, and the cuts are added to them.

    Args:
        plan: The plan.
        schedule: The schedule that it was priced with, if the plan does not say so itself.
        order: The schedule that it was priced with. It runs unchanged.
        costs: The costs that shaped the order.

    Returns:
        The plan to train, verify or simulate.

    Raises:
        MeshwrightError: The stages of the plan leave out layers, or contradict its keywords.

    Examples:
        >>> from meshwright import Plan, PlanStage, runnable
        >>> stages = (PlanStage(0, 3, (2, 0)), PlanStage(4, 5, (3,)))
        >>> found = runnable(Plan("spp", stages, 8, step_s=1.0, lower_bound_s=1.0, peak_bytes=(0.0, 0.0, 0.0)))
        >>> found.width, found.ranks, found.stages
        ((2, 1), (2, 0, 3), (4,))
    """
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        if after.first != before.last + 1:
            raise MeshwrightError(f"a stage ends with layer {before.last}, and the next one begins with layer {after.first}")
    if plan.stages and plan.stages[0].first != 0:
        raise MeshwrightError(f"the first stage begins with layer {plan.stages[0].first}, not with layer 0")
    own: dict[str, Any] = dict(getattr(plan, "parallel", None) or {})
    given = own or {"pp": len(plan.stages), "ranks": plan.ranks}
    if not own and max(plan.widths, default=1) > 1:
        given["width"] = plan.widths
    if not own and order is None:
        given["schedule"] = schedule
    if not given.get("stages"):
        given["stages"] = tuple(stage.first for stage in plan.stages[1:])
    given.setdefault("microbatches", plan.microbatches)
    if order is not None:
        given = {key: value for key, value in given.items() if key not in ("schedule", "options", "order")} | {"order": order}
    return Parallel.of({**given, "costs": tuple(costs)} if costs else given)
