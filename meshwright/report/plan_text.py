"""A plan as text: what was assumed, what was searched, the best plan of each schedule, and the chosen plan with its reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.ir.cluster import Cluster
from meshwright.ir.layer_costs import Profile
from meshwright.ir.plan.chosen_plan import Plan

SHOWN = 5
"""How many other plans of SPP are shown."""
STAGES = 24
"""How many stages are shown."""
HEAD = "tp  pp  dp   rows  microbatches  schedule              recompute  step s    tokens/s/device  MFU    bubble  peak GB"


def plan_text(plan: Plan, profile: Profile, cluster: Cluster, *, file: Path | None = None) -> str:
    """Returns a plan as lines of text."""
    if not plan.row:
        return "\n".join(_short(plan, profile, cluster))
    return "\n".join([*_searched(plan, cluster), *_table(plan), *_chosen(plan, profile, cluster), *_more(plan, file)])


def _short(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    used = len(plan.ranks)
    idle = f", {cluster.size - used} idle" if used < cluster.size else ""
    yield f"{plan.planner}: {len(plan.stages)} stages on {used} of {cluster.size} devices{idle}, {plan.microbatches} microbatches"
    yield f"step {plan.step_s:.6g} s, at most {plan.gap:.2%} above any order of these stages"
    if plan.paper_step_s is not None:
        yield f"by the published costs {plan.paper_step_s:.6g} s"
    yield from _stages(plan, profile)
    if plan.alternatives:
        yield "other plans:"
        yield from (f"  {other.plan}: {other.step_s:.6g} s, {other.reason}" for other in plan.alternatives[:SHOWN])


def _searched(plan: Plan, cluster: Cluster) -> Iterator[str]:
    yield "assumed:"
    yield from (f"  {note}" for note in plan.notes)
    counts = plan.counts
    yield (
        f"searched: {counts.get('bounded', 0)} plans on {cluster.size} devices, {counts.get('died_by_memory', 0)} do not fit, "
        f"{counts.get('simulated', 0)} simulated, {counts.get('proved', 0)} proved"
    )


def _table(plan: Plan) -> Iterator[str]:
    yield ""
    yield "the best plan of each schedule:"
    yield f"  {HEAD}"
    yield f"  {_line(plan.row, plan.step_s)}  <- chosen"
    for other in plan.alternatives:
        if other.row:
            yield f"  {_line(other.row, other.step_s)}  {other.reason}"


def _line(row: Mapping[str, Any], step_s: float) -> str:
    rate, mfu = row["tokens_per_s_per_device"], row["mfu"]
    step = f"{step_s:.4g}" if step_s < float("inf") else "-"
    return (
        f"{row['tp']:<3} {row['pp']:<3} {row['dp']:<4} {row['rows'] or '-':<5} {row['microbatches']:<13} {row['schedule']:<21} "
        f"{'yes' if row['recompute'] else 'no':<10} {step:<9} {f'{rate:.4g}' if rate else '-':<16} "
        f"{f'{mfu:.0%}' if mfu else '-':<6} {row['bubble']:<7.1%} {row['peak_bytes'] / 1e9:.3g}"
    )


def _chosen(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    used = len(set(plan.ranks))
    idle = f", {cluster.size - used} idle" if used < cluster.size else ""
    yield ""
    yield f"chosen: {plan.row['schedule']} on {used} of {cluster.size} devices{idle}, {plan.microbatches} microbatches"
    yield f"  step {plan.step_s:.6g} s; no enumerated plan is faster than {plan.lower_bound_s:.6g} s (gap {plan.gap:.2%})"
    if profile.error:
        low, high = plan.step_s / (1 + profile.error), plan.step_s * (1 + profile.error)
        yield f"  uncertainty: times of layers may be off by {profile.error:.0%}, so {low:.4g} to {high:.4g} s"
    if plan.rivals:
        yield "  each choice against its nearest rival:"
        yield from (f"    {rival.reason}   ({rival.plan})" for rival in plan.rivals)
    if plan.causes:
        yield "  step time by cause:"
        yield from (
            f"    {cause:<22} {seconds:>10.6f} s  {seconds / plan.step_s:>6.1%}" for cause, seconds in plan.causes.items()
        )
    if plan.memory:
        worker = max(range(len(plan.memory)), key=lambda w: plan.memory[w].total)
        use = plan.memory[worker]
        yield f"  memory of the tightest worker ({worker}), {use.total / 1e9:.4g} GB:"
        yield from (f"    {name:<22} {size / 1e9:>10.4g} GB" for name, size in asdict(use).items() if size)
    yield from _stages(plan, profile)
    yield f"  rank layout: {_shortened(plan.ranks)}"


def _stages(plan: Plan, profile: Profile) -> Iterator[str]:
    yield "stage  layers     devices"
    for number, stage in enumerate(plan.stages[:STAGES]):
        names = f"{profile.layers[stage.first].name} to {profile.layers[stage.last].name}"
        yield f"{number:>5}  {stage.first:>3}-{stage.last:<3}    {_runs(stage.devices)}   {names}"
    if len(plan.stages) > STAGES:
        yield f"  ... {len(plan.stages) - STAGES} more"


def _more(plan: Plan, file: Path | None) -> Iterator[str]:
    if plan.flips:
        yield "  another plan is better:"
        for flip in plan.flips:
            size = f"{flip['size']}" if "size" in flip else f"{flip['factor']:.2f} times as much"
            yield f"    {flip['what']}: from {size} on: {flip['plan']}"
    name = file or "plan.json"
    yield "next:"
    if file is None:
        yield f"  meshwright plan ... -o {name}"
    yield f"  meshwright verify MODEL --plan {name}"
    yield f"  meshwright train MODEL --plan {name}"


def _shortened(ranks: Sequence[int]) -> str:
    if list(ranks) == list(range(len(ranks))):
        return f"rank r on device r, {len(ranks)} ranks"
    shown = " ".join(map(str, ranks[:32]))
    return f"devices of ranks 0, 1, ...: {shown}{' ...' if len(ranks) > 32 else ''}"


def _runs(devices: Sequence[int]) -> str:
    """Returns devices with runs written as first-last."""
    found: list[list[int]] = []
    for device in sorted(set(devices)):
        if found and device == found[-1][-1] + 1:
            found[-1].append(device)
        else:
            found.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
