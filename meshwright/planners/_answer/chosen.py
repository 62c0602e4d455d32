"""From a simulated plan to the answer: its numbers by cause and class, what else was tried, and what was assumed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.costs.memory.memory_classes import RESERVE
from meshwright.ir.plan.chosen_plan import MemoryUse, Plan, PlanStage
from meshwright.ir.profile import Profile, ProfileSource
from meshwright.ir.timeline import Timeline
from meshwright.planners._answer.compared import best_of_schedules, rivals
from meshwright.planners._answer.plan_row import name, row
from meshwright.planners._pricing.pool import Pool, SearchTally
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.pricing import Pricer, tensor_of
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import ASSUMED

DELAYED = "pipedream, pipedream_2bw and cyclic are not searched: they train with delayed parameters"

EARLY = "the search ended before its work was done: other orders and other devices for the same stages may be faster"


def plan_of(
    pricer: Pricer,
    pool: Pool,
    tally: SearchTally,
    best: Priced,
    timeline: Timeline | None = None,
    uses: tuple[MemoryUse, ...] = (),
) -> Plan:
    """Returns the plan with everything that explains it. Without a timeline it is not proved yet."""
    problem = pricer.problem
    return Plan(
        planner="search",
        stages=best.stages,
        microbatches=best.microbatches,
        step_s=best.step_s,
        lower_bound_s=min(best.step_s, tally.open_s),
        peak_bytes=best.peak_bytes,
        parallel=best.keywords,
        memory=uses,
        causes=causes(best, timeline) if timeline is not None else {},
        counts={
            "bounded": tally.bounded,
            "died_by_memory": tally.died,
            "simulated": pricer.simulated,
            "actions": pricer.actions,
            "proved": pricer.proved,
        },
        row=row(problem, best),
        alternatives=best_of_schedules(problem, pool, best),
        rivals=rivals(pool, best),
        notes=(
            *notes(problem, best.stages, tensor=any(tensor_of(each.plan).tp > 1 for each in pool.plans)),
            DELAYED,
            *([EARLY] if tally.ended_early else []),
        ),
        name=name(best.plan),
        error=problem.profile.error,
    )


def causes(best: Priced, timeline: Timeline) -> dict[str, float]:
    """What a step consists of, on the worker that computes the longest; the parts add up to it."""
    busy = max(timeline.busy_s(worker) for worker in range(timeline.workers))
    ends = max((spans[-1].end_s for spans in timeline.compute if spans), default=0.0)
    tensor = min(best.tensor_s, busy)
    sync = timeline.makespan_s - ends
    return {
        "compute": busy - tensor,
        "tensor communication": tensor,
        "fill and drain": ends - busy,
        "sync": sync,
        "update": best.update_s,
    }


def notes(problem: Problem, stages: Sequence[PlanStage], *, tensor: bool) -> tuple[str, ...]:
    """Returns what was assumed for a plan with these stages, and what was measured; `tensor`: plans have tensor ranks."""
    found = [_times(problem.profile), _memory(problem)]
    if any(problem.differ(stage.devices) for stage in stages):
        found.append("devices of one stage differ: the time of the stage is that of the slowest of them")
    if not problem.profile.rows:
        found.append("the profile does not know its rows: devices that share a microbatch take an equal part of its time")
    if tensor:
        found.append(ASSUMED)
    if not np.isfinite(problem.memory_rate).all():
        found.append("updates take no time: the bandwidth of device memory is not known")
    return tuple(found)


def _times(profile: Profile) -> str:
    """Where the times of layers come from."""
    where = f" on {profile.device}" if profile.device else ""
    how = {
        ProfileSource.MEASURED: f"measured{where}",
        ProfileSource.ESTIMATED: f"estimated{where.replace(' on ', ' for ')} from operations, bytes and what the device achieves",
        ProfileSource.PUBLISHED: "from a published profile",
    }
    band = f", may be off by {profile.error:.0%}" if profile.error else ""
    return f"times of layers: {how[profile.source]}, {profile.precision}{band}"


def _memory(problem: Problem) -> str:
    """How memory is counted."""
    if problem.limits.memory_free:
        return "memory: not looked at"
    if not np.isfinite(problem.memory).any():
        return "memory: that of the devices is not known, so every plan fits"
    kept = any(layer.saved_bytes for layer in problem.profile.layers)
    activations = "" if kept else ", activations count 0 bytes because the profile does not say what layers keep"
    return f"memory: {RESERVE:.0%} of each device is kept free for the allocator and the driver{activations}"
