"""A plan as text: what was assumed, what was searched, the best plan of each schedule, and the chosen plan with its reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.costs.memory.memory_classes import RESERVE
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import MemoryUse, Plan
from meshwright.ir.profile import Profile
from meshwright.report.prediction_log import band_of

SHOWN = 5
"""How many other plans of SPP are shown."""
STAGES = 24
"""How many stages are shown."""


def plan_text(plan: Plan, profile: Profile, cluster: Cluster, *, steps: Sequence[str] = ()) -> str:
    """Returns a plan as lines of text. `steps` are the commands to run next."""
    if not plan.row:
        lines = _short(plan, profile, cluster)
    else:
        lines = iter([*_searched(plan, cluster), *_table(plan), *_chosen(plan, profile, cluster), *_flips(plan, cluster)])
    return "\n".join([*lines, *(["next:", *(f"  {step}" for step in steps)] if steps else [])])


def _short(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    yield from _assumed(plan)
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    yield f"{plan.planner}: {stages} on {_used(plan, cluster)}, {plan.microbatches} microbatches"
    yield f"step {plan.step_s:.6g} s{_band(plan)}, at most {plan.gap:.2%} above any order of these stages"
    if plan.paper_step_s is not None:
        yield f"by the published costs {plan.paper_step_s:.6g} s"
    yield from _parts(plan)
    yield from _stages(plan, profile)
    if plan.alternatives:
        yield "other plans:"
        yield from (f"  {other.plan}: {other.step_s:.6g} s, {other.reason}" for other in plan.alternatives[:SHOWN])


def _assumed(plan: Plan) -> Iterator[str]:
    yield "assumed and measured:"
    yield from (f"  {note}" for note in plan.notes)


def _searched(plan: Plan, cluster: Cluster) -> Iterator[str]:
    yield from _assumed(plan)
    counts, plural = plan.counts, "s" * (cluster.size != 1)
    yield (
        f"searched: {counts.get('bounded', 0)} plans on {cluster.size} device{plural}, "
        f"{counts.get('died_by_memory', 0)} do not fit, {counts.get('simulated', 0)} simulated, {counts.get('proved', 0)} proved"
    )


def _table(plan: Plan) -> Iterator[str]:
    chosen = _cells(plan.row, plan.step_s)
    lines = [(*chosen, ""), (*chosen.values(), "<- chosen")]
    lines += [(*_cells(other.row, other.step_s).values(), other.reason) for other in plan.alternatives if other.row]
    widths = [max(len(line[k]) for line in lines) for k in range(len(chosen))]
    yield ""
    yield "the best simulated plan of each schedule (dp: copies, or the devices of each stage):"
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield f"  {'  '.join([*cells, line[-1]])}".rstrip()
    yield from (f"  {other.plan}: {other.reason}" for other in plan.alternatives if not other.row)


def _cells(row: Mapping[str, Any], step_s: float) -> dict[str, str]:
    """Returns a row of the table by its heads."""
    rate, mfu, widths = row["tokens_per_s_per_device"], row["mfu"], row["width"]
    copies = "+".join(map(str, widths)) if widths and max(widths) > 1 else str(row["dp"])
    return {
        "tp": str(row["tp"]),
        "pp": str(row["pp"]),
        "dp": copies if row["zero"] == "replicated" else f"{copies} {row['zero']}",
        "rows": str(row["rows"] or "-"),
        "microbatches": str(row["microbatches"]),
        "schedule": row["schedule"],
        "recompute": "yes" if row["recompute"] else "no",
        "step s": f"{step_s:.4g}" if step_s < float("inf") else "-",
        "tokens/s/device": f"{rate:.4g}" if rate else "-",
        "MFU": f"{mfu:.0%}" if mfu else "-",
        "bubble": f"{row['bubble']:.1%}",
        "peak GB": f"{row['peak_bytes'] / 1e9:.3g}",
    }


def _chosen(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    yield ""
    yield f"chosen: {plan.name} on {_used(plan, cluster)}"
    yield f"  step {plan.step_s:.6g} s{_band(plan)}"
    others = "enumerated plan" if plan.planner == "search" else "order of these stages"
    yield f"  no {others} is faster than {plan.lower_bound_s:.6g} s (gap {plan.gap:.2%})"
    if plan.rivals:
        yield "  each choice against its nearest simulated rival, whose step and peak are longer by:"
        width = max(len(rival.reason) for rival in plan.rivals)
        yield from (f"    {rival.reason:<{width}}  ({rival.plan})" for rival in plan.rivals)
    yield from (f"  {line}" for line in _parts(plan))
    yield from (f"  {line}" for line in _stages(plan, profile))
    yield f"  rank layout: {_layout(plan.ranks)}"


def _parts(plan: Plan) -> Iterator[str]:
    """The step by cause, and the memory of the worker whose devices are the fullest by class."""
    if plan.causes:
        yield "step time by cause:"
        for cause, seconds in plan.causes.items():
            yield f"  {cause:<22} {seconds:>10.6f} s  {seconds / plan.step_s if plan.step_s else 0.0:>6.1%}"
    if plan.memory:
        worker = max(range(len(plan.memory)), key=lambda w: _filled(plan.memory[w]))
        use = plan.memory[worker]
        of = f" of {use.reserve / RESERVE / 1e9:.4g}" if use.reserve else ""
        yield f"memory of the tightest worker ({worker}), {use.total / 1e9:.4g}{of} GB:"
        yield from (f"  {name:<22} {size / 1e9:>10.4g} GB" for name, size in asdict(use).items() if size)


def _filled(use: MemoryUse) -> tuple[float, float]:
    """How full a device is, and how much it holds. The reserve is a share of the device, if its memory is known."""
    return (use.total / use.reserve if use.reserve else 0.0), use.total


def _used(plan: Plan, cluster: Cluster) -> str:
    used, size = len(set(plan.ranks)), cluster.size
    idle = f", {size - used} idle" if used < size else ""
    return f"{used} of {size} device{'s' if size > 1 else ''}{idle}"


def _band(plan: Plan) -> str:
    """The uncertainty of the step."""
    if not plan.error:
        return ""
    low, high = band_of(plan.step_s, plan.error)
    return f", uncertain by {plan.error:.0%}: {low:.4g} to {high:.4g} s"


def _stages(plan: Plan, profile: Profile) -> Iterator[str]:
    shown = plan.stages[:STAGES]
    layers = [f"{stage.first}-{stage.last}" for stage in shown]
    devices = [_runs(stage.devices) for stage in shown]
    wide = [max(map(len, column)) for column in (("layers", *layers), ("devices", *devices))]
    yield f"stage  {'layers':<{wide[0]}}  {'devices':<{wide[1]}}  from and to"
    for number, stage in enumerate(shown):
        names = f"{profile.layers[stage.first].name} to {profile.layers[stage.last].name}"
        yield f"{number:>5}  {layers[number]:<{wide[0]}}  {devices[number]:<{wide[1]}}  {names}"
    if len(plan.stages) > STAGES:
        yield f"  ... {len(plan.stages) - STAGES} more"


def _flips(plan: Plan, cluster: Cluster) -> Iterator[str]:
    if not plan.flips:
        return
    yield "  another plan is better with:"
    memory = {device.memory_bytes for device in cluster.devices}
    for flip in plan.flips:
        more, factor = flip["direction"] == "more", flip["factor"]
        word = "at least" if more else "at most"
        match flip["what"]:
            case "links":
                what = f"links {word} {factor:.3g} times as fast"
            case "memory" if len(memory) == 1:
                what = f"{word} {factor * min(memory) / 1e9:.4g} GB of memory"
            case "memory":
                what = f"{word} {factor:.3g} times the memory"
            case unit:
                what = f"{word} {flip['size']} {'rows' if unit == 'batch' else unit} per step"
        yield f"    {what}: {flip['plan']}"


def _layout(ranks: Sequence[int]) -> str:
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
