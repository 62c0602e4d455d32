"""A plan as text: its stages on devices, its time, and the plans that were nearly as good."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.cluster import Cluster
from meshwright.ir.layer_costs import Profile
from meshwright.ir.plan.chosen_plan import Plan

SHOWN = 5
"""How many other plans are shown."""


def plan_text(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    """Returns a plan as lines of text."""
    used = len(plan.ranks)
    idle = f", {cluster.size - used} idle" if used < cluster.size else ""
    lines = [
        f"{plan.planner}: {len(plan.stages)} stages on {used} of {cluster.size} devices{idle}, {plan.microbatches} microbatches",
        f"step {plan.step_s:.6g} s, at most {plan.gap:.2%} above any order of these stages",
    ]
    if plan.paper_step_s is not None:
        lines.append(f"by the published costs {plan.paper_step_s:.6g} s")
    lines.append("stage  layers     devices")
    for number, stage in enumerate(plan.stages):
        names = f"{profile.layers[stage.first].name} to {profile.layers[stage.last].name}"
        lines.append(f"{number:>5}  {stage.first:>3}-{stage.last:<3}    {_runs(stage.devices)}   {names}")
    if plan.alternatives:
        lines.append("other plans:")
        lines += [f"  {other.plan}: {other.step_s:.6g} s, {other.reason}" for other in plan.alternatives[:SHOWN]]
    return "\n".join(lines)


def _runs(devices: Sequence[int]) -> str:
    """Returns devices with runs written as first-last."""
    found: list[list[int]] = []
    for device in sorted(devices):
        if found and device == found[-1][-1] + 1:
            found[-1].append(device)
        else:
            found.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
