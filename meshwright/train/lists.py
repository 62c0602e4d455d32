"""From what a user asks for to the lists that run: build, widen, tie, lower, and prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.ir.plan import Parallel
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.passes.check import prove
from meshwright.passes.lower import lower
from meshwright.passes.widen import widen
from meshwright.simulate.budget import stage_aware, with_recompute
from meshwright.train.saved import Kept


def stages_of(parallel: Parallel) -> int:
    """How many stages the schedule of a plan has."""
    return _built(parallel, steps=1).stages


def lists_for(
    parallel: Parallel, *, ties: Sequence[tuple[int, ...]] = (), steps: int = 1, kept: Sequence[Kept] | None = None
) -> Schedule:
    """The lowered and proved schedule of a plan: one step to repeat, or all steps where it has no flush.

    `kept` says what stages keep, where recompute is chosen by a budget.
    """
    built = _built(parallel, steps=steps)
    if built.flush:
        built = built.repeated(1)
    if parallel.width:
        built = widen(built, parallel.width)
    built = replace(built, ties=tuple(ties))
    recompute = parallel.recompute
    how: str | Sequence[Recompute] | None = recompute if isinstance(recompute, str) else None
    if isinstance(recompute, float):
        built, how = _within(built, recompute, kept)
    elif isinstance(recompute, Sequence) and not isinstance(recompute, str):
        how = [Recompute(float(share)) for share in recompute]
    lowered = lower(built, sync=parallel.sync, recompute=how)
    if not lowered.flush:
        lowered = lowered.with_lists(lowered.lists)
    return prove(lowered)


def _within(schedule: Schedule, budget_bytes: float, kept: Sequence[Kept] | None) -> tuple[Schedule, list[Recompute] | None]:
    """A schedule with as many layers kept as a budget allows, or what is to be recomputed for that."""
    if kept is None:
        raise MeshwrightError("a budget needs to know what stages keep", fix="recompute='inline', or shares for each stage")
    sizes = [{"activation_bytes": of.bytes[0], "output_bytes": of.output, "gradient_bytes": of.output} for of in kept]
    costs = [StageCost(1.0, 1.0, 1.0, **size) for size in sizes]
    watched = max(of.output for of in kept)  # a first run looks at a copy of what it is given
    shares = stage_aware(schedule, costs, budget_bytes=budget_bytes, reserved_bytes=watched, layers=[of.bytes for of in kept])
    return (schedule, list(shares)) if schedule.recompute is None else (with_recompute(schedule, shares), None)


def _built(parallel: Parallel, *, steps: int) -> Schedule:
    options: dict[str, Any] = dict(parallel.options)
    return schedules.build(parallel.schedule, workers=parallel.pp, microbatches=parallel.microbatches, steps=steps, **options)
