"""A plan as a row of a table: its choices, rates, memory; and in words."""

from __future__ import annotations

from typing import Any

from meshwright.costs.stages import achieved_speed
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.pricing import tensor_of
from meshwright.planners._search.candidate_plans import Candidate, WidePlan
from meshwright.planners._search.problem import Problem


def choices(priced: Priced) -> dict[str, Any]:
    """What a search chooses for a plan."""
    plan = priced.plan
    return {
        "tp": tensor_of(plan).tp,
        "pp": priced.workers,
        "dp": plan.dp,
        "width": list(priced.widths) if max(priced.widths, default=1) > 1 else None,
        "zero": plan.zero,
        "rows": plan.rows if plan.share == 1 else -(-plan.rows // plan.share) if plan.rows else None,
        "microbatches": priced.microbatches,
        "schedule": priced.family.name,
        "recompute": plan.recompute,
        "layout": plan.layout,
    }


def row(problem: Problem, priced: Priced) -> dict[str, Any]:
    """The choices of a plan, and what follows from them."""
    rows, tokens = problem.step_rows, problem.profile.tokens_per_row
    used = len(set(priced.parallel["ranks"]))
    work = sum(cost.forward_s + cost.backward_s + cost.recompute_s for cost in priced.costs)
    busy = priced.microbatches * work / priced.workers
    bubble = max(0.0, 1.0 - busy / priced.step_s) if priced.step_s else 0.0
    return {
        **choices(priced),
        "devices": used,
        "tokens_per_s_per_device": rows * tokens / priced.step_s / used if rows and priced.step_s else None,
        "mfu": _mfu(problem, priced, rows),
        "bubble": bubble,
        "peak_bytes": priced.peak_bytes[priced.tightest],
    }


def _mfu(problem: Problem, priced: Priced, rows: int | None) -> float | None:
    """Operations of a step (three times those of its forwards) over what its devices achieve in the precision of the profile."""
    flops, devices = sum(layer.flops for layer in problem.profile.layers), problem.cluster.devices
    if not rows or not flops or not devices or not priced.step_s:
        return None
    speeds = [achieved_speed(devices[number], problem.profile.precision) for number in set(priced.parallel["ranks"])]
    return 3.0 * flops * rows / (priced.step_s * sum(speeds)) if min(speeds) > 0 else None


def name(plan: Candidate | WidePlan) -> str:
    """A plan in words."""
    tensor = tensor_of(plan)
    if isinstance(plan, WidePlan):
        widths = [stage.width for stage in plan.stages]
        parts = [plan.family.name, f"pp {len(widths)}", f"width {'+'.join(map(str, widths))}" if max(widths) > 1 else ""]
    else:
        parts = [plan.family.name, f"pp {plan.pp}", f"dp {plan.dp}" if plan.dp > 1 else ""]
        parts += [plan.zero if plan.zero != "replicated" else ""]
        parts += ["copies together" if plan.layout == "copies" and plan.dp > 1 else ""]
    parts += [f"tp {tensor.tp} {tensor.name}" if tensor.tp > 1 else ""]
    parts += [f"{plan.microbatches} x {plan.rows} rows" if plan.rows else f"{plan.microbatches} microbatches"]
    return ", ".join(filter(None, [*parts, "recompute" if plan.recompute else ""]))


def gb(size: float) -> str:
    """A size in GB."""
    return f"{size / 1e9:.3g} GB"
