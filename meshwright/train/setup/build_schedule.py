"""From what a user asks for to the lists that run: build or take an order, widen, tie, lower, and prove.

This is the one place where a plan becomes a schedule. `costs` are those of captured stages: a plan that has costs of its own
(they were measured) is built and lowered by those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_order import widths
from meshwright.ir.profile import StageCost, rows_for
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.passes.check import prove
from meshwright.passes.lower import lower
from meshwright.passes.widen import widen
from meshwright.simulate.recompute_budget import stage_aware, with_recompute
from meshwright.train.setup.saved_bytes import Kept


def stages_of(parallel: Parallel) -> int:
    """How many stages the schedule of a plan has."""
    return (parallel.order or _by_name(parallel, steps=1, costs=None)).stages


def lists_for(
    parallel: Parallel,
    *,
    ties: Sequence[tuple[int, ...]] = (),
    steps: int = 1,
    kept: Sequence[Kept] | None = None,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """The lowered and proved schedule of a plan: one step to repeat, or all steps where it has no flush.

    `kept` says what stages keep, where recompute is chosen by a budget.
    """
    built = built_for(parallel, steps=steps, costs=costs)
    if parallel.width and not widths(built):
        built = widen(built, parallel.width)
    built = _tied(built, tuple(ties))
    recompute = parallel.recompute
    how: str | Sequence[Recompute] | None = recompute if isinstance(recompute, str) else None
    if isinstance(recompute, float):
        built, how = _within(built, recompute, kept)
    elif isinstance(recompute, Sequence) and not isinstance(recompute, str):
        how = [Recompute(float(share)) for share in recompute]
    given = rows_for(parallel.costs, built.stages) if parallel.costs else None
    lowered = lower(built, sync=parallel.sync, recompute=how, costs=given)
    if not lowered.flush:
        lowered = lowered.with_lists(lowered.lists)
    return prove(lowered)


def built_for(parallel: Parallel, *, steps: int = 1, costs: Sequence[StageCost] | None = None) -> Schedule:
    """The schedule of a plan as it is drawn, before anything is added to it."""
    if parallel.order is not None:
        return _rounds(parallel.order, parallel, steps)
    built = _by_name(parallel, steps=steps, costs=costs)
    if ":" in parallel.schedule:
        Parallel.of({**parallel.given(), "schedule": built.name, "order": built})  # sizes that changed with its costs
        return _rounds(built, parallel, steps)
    return built.repeated(1) if built.flush else built


def _by_name(parallel: Parallel, *, steps: int, costs: Sequence[StageCost] | None) -> Schedule:
    """Built by name: with the plan's costs, else with those of captured stages."""
    given: dict[str, Any] = {"workers": parallel.pp, "microbatches": parallel.microbatches, "steps": steps, **parallel.options}
    rows = parallel.costs or costs

    def of_stages(schedule: Schedule) -> Sequence[StageCost] | None:
        return None if rows is None else rows_for(rows, schedule.stages)

    return schedules.shaped(parallel.schedule, costs=of_stages, **given)


def _rounds(order: Schedule, parallel: Parallel, steps: int) -> Schedule:
    """An order for so many steps: one, or without a flush as many rounds as they have."""
    if order.flush:
        return order.repeated(1)
    wanted = steps * parallel.microbatches // order.microbatches
    if order.steps == wanted:
        return order
    repeats = order.repeats + wanted - order.steps
    if not any(order.period) or repeats < 0:
        least = order.steps if not any(order.period) else order.steps - order.repeats
        raise MeshwrightError(
            f"{order.name} has lists for {'' if not any(order.period) else 'at least '}{least} rounds of "
            f"{order.microbatches} microbatches, and {steps} steps of {parallel.microbatches} are {wanted} rounds",
            fix="as many steps as it has, or a period that can be repeated",
        )
    return order.repeated(repeats)


def _tied(built: Schedule, ties: tuple[tuple[int, ...], ...]) -> Schedule:
    """With the ties of the model; an order may name them itself, and one that is lowered must."""
    if built.ties == ties:
        return built
    if built.ties or built.lowered:
        why = "is lowered for" if built.lowered else "has"
        raise MeshwrightError(
            f"{built.name} {why} the ties {built.ties}, and stages of the model share parameters in the groups {ties}",
            fix="the schedule before lowering, without ties: they are found in the model",
        )
    return replace(built, ties=ties)


def _within(schedule: Schedule, budget_bytes: float, kept: Sequence[Kept] | None) -> tuple[Schedule, list[Recompute] | None]:
    """A schedule with as many layers kept as a budget allows, or what is to be recomputed for that."""
    if kept is None:
        raise MeshwrightError("a budget needs to know what stages keep", fix="recompute='inline', or shares for each stage")
    sizes = [{"activation_bytes": of.bytes[0], "output_bytes": of.output, "gradient_bytes": of.output} for of in kept]
    costs = [StageCost(1.0, 1.0, 1.0, **size) for size in sizes]
    watched = max(of.output for of in kept)  # a first run looks at a copy of what it is given
    shares = stage_aware(schedule, costs, budget_bytes=budget_bytes, reserved_bytes=watched, layers=[of.bytes for of in kept])
    return (schedule, list(shares)) if schedule.recompute is None else (with_recompute(schedule, shares), None)


def refuse_early(parallel: Parallel) -> None:
    """Refuse what is wrong with a schedule whatever the model is."""
    refuse_endless(parallel, flush=parallel.order is None or parallel.order.flush)
    stages_of(parallel)


def refuse_endless(parallel: Parallel, *, flush: bool) -> None:
    """Logging, evaluation and checkpoints happen where a step ends on all workers."""
    if not flush:
        raise MeshwrightError(
            f"{parallel.schedule} never ends a step on all workers at once: nothing could be logged or saved between steps",
            fix="a schedule with a flush: onef1b, chimera, zero_bubble, ... (meshwright.verify runs the others)",
        )
