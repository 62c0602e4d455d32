"""From a simulated plan to the answer: its numbers by cause and class, the best plan of each schedule, and the nearest rivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.costs.memory_classes import RESERVE
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.chosen_plan import MemoryUse, Plan, Rejected
from meshwright.ir.timeline import Timeline
from meshwright.planners._limits import NothingFitsError
from meshwright.planners._search.candidates import Candidate, WidePlan
from meshwright.planners._search.pool import Pool, SearchTally
from meshwright.planners._search.pricing import Priced, Pricer, tensor_of
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import ASSUMED

SPARE = 1.01
"""How much more memory than the least is recommended, so that rounding does not matter."""


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
    lower = min(best.step_s, tally.open_s)
    return Plan(
        planner="search",
        stages=best.stages,
        microbatches=best.microbatches,
        step_s=best.step_s,
        lower_bound_s=lower,
        peak_bytes=best.peak_bytes,
        parallel=best.parallel,
        memory=uses,
        causes=causes(best, timeline) if timeline is not None else {},
        counts={
            "bounded": tally.bounded,
            "died_by_memory": tally.died,
            "simulated": pricer.simulated,
            "actions": pricer.actions,
            "proved": pricer.proved,
        },
        row=row(problem, best, timeline),
        alternatives=_families(problem, pool, best),
        rivals=_rivals(problem, pool, best),
        notes=_notes(problem, pool),
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


def row(problem: Problem, priced: Priced, timeline: Timeline | None = None) -> dict[str, Any]:
    """The numbers of a plan as a row of a table."""
    plan = priced.plan
    wide = isinstance(plan, WidePlan)
    profile = problem.profile
    rows = None if not profile.rows else problem.batch or (problem.microbatches or 0) * (problem.limits.rows or 0)
    used = len(set(priced.parallel["ranks"]))
    work = sum(cost.forward_s + cost.backward_s + cost.recompute_s for cost in priced.costs)
    busy = priced.microbatches * work / priced.workers
    bubble = timeline.bubble_ratio if timeline is not None else max(0.0, 1.0 - busy / priced.step_s) if priced.step_s else 0.0
    return {
        "tp": tensor_of(plan).tp,
        "pp": priced.workers,
        "dp": plan.dp,
        "width": [stage.width for stage in priced.stages] if wide else None,
        "zero": plan.zero,
        "rows": plan.rows if plan.share == 1 else -(-plan.rows // plan.share) if plan.rows else None,
        "microbatches": priced.microbatches,
        "schedule": priced.family.name,
        "recompute": plan.recompute,
        "layout": plan.layout,
        "devices": used,
        "tokens_per_s_per_device": rows * profile.tokens_per_row / priced.step_s / used if rows and priced.step_s else None,
        "mfu": _mfu(problem, priced, rows),
        "bubble": bubble,
        "peak_bytes": max(priced.peak_bytes, default=0.0),
        "runnable": True,
    }


def _mfu(problem: Problem, priced: Priced, rows: int | None) -> float | None:
    """Operations of a step (three times those of its forwards) over what the devices achieve."""
    flops = sum(layer.flops for layer in problem.profile.layers)
    speeds = (
        [max(problem.cluster.devices[device].flops_per_s.values(), default=0.0) for device in set(priced.parallel["ranks"])]
        if (problem.cluster.devices)
        else []
    )
    if not rows or not flops or not speeds or min(speeds) <= 0 or not priced.step_s:
        return None
    return 3.0 * flops * rows / (priced.step_s * sum(speeds))


def name(priced: Priced) -> str:
    """A plan in words."""
    plan, tensor = priced.plan, tensor_of(priced.plan)
    parts = [priced.family.name, f"pp {priced.workers}"]
    if isinstance(plan, WidePlan):
        widths = [stage.width for stage in plan.stages]
        parts += [f"width {'+'.join(map(str, widths))}"] if max(widths) > 1 else []
    else:
        parts += [f"dp {plan.dp}"] if plan.dp > 1 else []
        parts += [plan.zero] if plan.zero != "replicated" else []
        parts += ["copies together"] if plan.layout == "copies" and plan.dp > 1 else []
    parts += [f"tp {tensor.tp} {tensor.name}"] if tensor.tp > 1 else []
    parts += [f"{priced.microbatches} x {plan.rows} rows" if plan.rows else f"{priced.microbatches} microbatches"]
    return ", ".join(parts + (["recompute"] if plan.recompute else []))


def _families(problem: Problem, pool: Pool, best: Priced) -> tuple[Rejected, ...]:
    """The best plan of each schedule, with why it lost."""
    found: dict[str, Priced] = {}
    for each in sorted(pool.plans, key=lambda priced: priced.step_s):
        found.setdefault(each.family.name, each)
    rows = []
    for each in found.values():
        if each is best or each.family.name == best.family.name:
            continue
        rows.append(Rejected(name(each), each.step_s, _why(each, best), row(problem, each)))
    names = {each.family.name for each in pool.plans}
    for each in sorted(pool.misfits, key=lambda priced: (priced.over_bytes, priced.step_s)):
        if each.family.name not in names:
            names.add(each.family.name)
            reason = f"memory: {each.over_bytes / 1e9:.3g} GB too much on the tightest worker"
            rows.append(Rejected(name(each), each.step_s, reason, row(problem, each)))
    return tuple(rows)


def _why(other: Priced, best: Priced) -> str:
    """Why a plan is slower: the share of its step in which workers wait, or more work."""
    more = other.step_s / best.step_s - 1.0
    if more <= 1e-9:
        return "as fast; the simpler or first found plan is kept"

    def busiest(priced: Priced) -> float:
        each = [cost.forward_s + cost.backward_s + cost.recompute_s for cost in priced.costs]
        return priced.microbatches * sum(each) / priced.workers

    waits = (other.step_s - busiest(other)) - (best.step_s - busiest(best))
    work = busiest(other) - busiest(best)
    reason = f"{waits:.3g} s more waiting" if waits >= work else f"{work:.3g} s more work"
    return f"slower by {more:.2%}: {reason}"


def _rivals(problem: Problem, pool: Pool, best: Priced) -> tuple[Rejected, ...]:
    """For each choice of the plan, the best simulated plan that chooses otherwise."""
    mine = row(problem, best)
    found: list[Rejected] = []
    for choice in ("schedule", "pp", "dp", "tp", "zero", "rows", "recompute", "layout", "width"):
        others = [each for each in pool.plans if row_value(each, choice, problem) != mine[choice]]
        if not others:
            continue
        rival = min(others, key=lambda priced: priced.step_s)
        seconds = rival.step_s - best.step_s
        size = max(rival.peak_bytes, default=0.0) - max(best.peak_bytes, default=0.0)
        reason = f"{choice} {mine[choice]} instead of {row_value(rival, choice, problem)}: {seconds:+.4g} s, {size / 1e9:+.3g} GB"
        found.append(Rejected(name(rival), rival.step_s, reason, {"choice": choice}))
    return tuple(found)


def row_value(priced: Priced, choice: str, problem: Problem) -> Any:
    """One number of the row of a plan."""
    plan = priced.plan
    wide = isinstance(plan, WidePlan)
    known: dict[str, Callable[[], Any]] = {
        "schedule": lambda: priced.family.name,
        "pp": lambda: priced.workers,
        "dp": lambda: plan.dp,
        "tp": lambda: tensor_of(plan).tp,
        "zero": lambda: plan.zero,
        "recompute": lambda: plan.recompute,
        "layout": lambda: plan.layout,
        "width": lambda: [stage.width for stage in priced.stages] if wide else None,
        "rows": lambda: plan.rows if plan.share == 1 else -(-plan.rows // plan.share) if plan.rows else None,
    }
    return known[choice]()


def _notes(problem: Problem, pool: Pool) -> tuple[str, ...]:
    profile = problem.profile
    found = [f"times of layers: {profile.source}" + (f", may be off by {profile.error:.0%}" if profile.error else "")]
    if not profile.rows:
        found.append("the profile does not know its rows: devices that share a microbatch take an equal part of its time")
    if problem.limits.memory_free:
        found.append("memory is not looked at")
    elif not np.isfinite(problem.memory).any():
        found.append("the memory of the devices is not known")
    else:
        found.append(f"{RESERVE:.0%} of each device is kept free for the allocator and the driver")
    if not any(layer.saved_bytes for layer in profile.layers):
        found.append("the profile does not say what layers keep for the backward: activations count 0 bytes")
    if any(tensor_of(each.plan).tp > 1 for each in pool.plans):
        found.append(ASSUMED)
    if not np.isfinite(problem.memory_rate).all():
        found.append("updates take no time: the bandwidth of device memory is not known")
    found.append("pipedream, pipedream_2bw and cyclic are not searched: they train with delayed parameters")
    return tuple(found)


def nothing_fits(pricer: Pricer, pool: Pool, misfit: Sequence[Candidate]) -> MeshwrightError:
    """The error if no plan fits: the least memory with which one would, by the engine's memory curve."""
    nearest = sorted(misfit, key=lambda c: (c.over_bytes, c.key))[:40]
    tried = [priced for each in nearest[:8] if (priced := pricer.quick(each)) is not None]
    small = [each for each in (*tried, *pool.misfits) if each.actions < 200_000]
    small = sorted(small, key=lambda each: (each.over_bytes, each.step_s))[:4]
    if not small:
        return NothingFitsError("no plan fits on these devices", fix="more devices, or --memory-free", needed_bytes=float("inf"))
    needs: list[tuple[float, int, Priced]] = []
    for each in small:
        pricer.engine(each)
        held = [peak - RESERVE * cap for peak, cap in zip(each.peak_bytes, each.capacity, strict=True)]
        needs.append((SPARE * max(held) / (1.0 - RESERVE), len(needs), replace(each)))
    needed, _, best = min(needs, key=lambda item: item[:2])
    have = min(best.capacity)
    return NothingFitsError(
        f"no plan fits: the one that needs the least ({name(best)}) needs {needed / 1e9:.4g} GB "
        f"on a device that has {have / 1e9:.4g} GB",
        fix=f"devices with {needed / 1e9:.4g} GB of memory",
        needed_bytes=needed,
    )
