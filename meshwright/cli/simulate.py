"""`meshwright simulate`: predicts when everything runs under given costs, and what each worker holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.cli._parts import cost_flags, emulation, inputs, outputs
from meshwright.cli._parts.flag_groups import with_groups
from meshwright.cli._parts.outputs import Format
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.plan import refuse_crowd
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Timeline
from meshwright.passes.lower import lower
from meshwright.passes.sync import Sync
from meshwright.report.terminal import timeline_text
from meshwright.simulate import simulate as predict

if TYPE_CHECKING:
    from meshwright.cli._parts.planned_schedule import PlannedRun


@with_groups
def simulate(
    name: inputs.Name,
    *,
    workers: inputs.Workers = 4,
    microbatches: inputs.Microbatches = 4,
    steps: inputs.Steps = None,
    option: inputs.Option = None,
    sync: Annotated[Sync, inputs.size_option(help="When gradients are summed.")] = Sync.EAGER,
    flags: cost_flags.CostFlags,
    wish: emulation.Emulation,
    format: inputs.FormatChoice = Format.TEXT,
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """Predict makespan, bubble, memory and a lower bound of a schedule, by name or from a file, or of a plan file."""
    outputs.refuse_binary(format, output)
    given = {
        "--steps": steps is not None,
        "--option": bool(option),
        "--workers": workers != 4,
        "--microbatches": microbatches != 4,
        "--sync": sync is not Sync.EAGER,
    }
    plan = _plan(name, flags, [flag for flag, is_given in given.items() if is_given])
    if plan is not None:
        _simulate_plan(plan, flags, wish, format, output, as_json=as_json)
        return
    schedule = inputs.load(name, workers=workers, microbatches=microbatches, steps=steps, option=option, flags=flags)
    if wish.emulate is not None:
        refuse_crowd(schedule.workers)
    flags.refuse_ring(schedule.ring or (sync is Sync.RING and not schedule.lowered))
    if schedule.lowered and schedule.recompute is None and any(cost.recompute_s for cost in flags.stages(schedule)):
        raise MeshwrightError(
            f"{name} was lowered without recompute", fix="lower it with its costs, or simulate it without --recompute-cost"
        )
    rows, links = flags.stages(schedule), flags.cluster or Cluster()
    lowered = lower(schedule, sync=sync, costs=rows, cluster=links) if wish.emulate is not None else schedule
    timeline = predict(lowered, rows, links, sync=sync, overlap=flags.overlap)
    measured = wish.run(lowered, rows, links, flags.overlap, timeline) if wish.emulate is not None else None
    if as_json:
        more = emulation.summary(wish, measured, timeline) if measured is not None else {}
        outputs.give(json.dumps({**summary(schedule, timeline), **more}), output)
        return
    found = predicted(schedule, timeline, format, colour=output is None and outputs.coloured())
    if measured is not None and isinstance(found, str) and format is Format.TEXT:
        found += "\n" + emulation.text(wish, measured, timeline)
    outputs.give(found, output)


def _plan(name: str, flags: cost_flags.CostFlags, refused: list[str]) -> PlannedRun | None:
    """Returns the run of a plan file; None if the name is not one."""
    if not name.endswith(".json"):
        return None
    from meshwright.cli._parts.planned_schedule import planned_run  # most answers need no plan

    return planned_run(name, flags=flags, refused=refused)


def _simulate_plan(
    plan: PlannedRun,
    flags: cost_flags.CostFlags,
    wish: emulation.Emulation,
    format: Format,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Predicts the lists that training runs, and runs them on emulated devices if asked. Shows the plan's prediction beside."""
    if wish.emulate is not None:
        refuse_crowd(max(plan.ranks, default=plan.schedule.workers - 1) + 1)
    timeline = predict(plan.schedule, plan.costs, plan.cluster, overlap=flags.overlap)
    measured = None
    if wish.emulate is not None:
        measured = wish.run(plan.schedule, plan.costs, plan.cluster, flags.overlap, timeline, plan.ranks)
    if as_json:
        more = emulation.summary(wish, measured, timeline) if measured is not None else {}
        outputs.give(json.dumps({**summary(plan.schedule, timeline), **plan.summary(timeline), **more}), output)
        return
    found = predicted(plan.schedule, timeline, format, colour=output is None and outputs.coloured())
    if isinstance(found, str) and format is Format.TEXT:
        found += "\n" + plan.text(timeline)
        found += "\n" + emulation.text(wish, measured, timeline) if measured is not None else ""
    outputs.give(found, output)


def predicted(schedule: Schedule, timeline: Timeline, form: Format, *, colour: bool) -> str | bytes:
    """Returns a prediction in one of the formats."""
    match form:
        case Format.JSON:
            return timeline.to_json()
        case Format.CSV:
            spans = (f"{s.worker},{s.lane.value},{s.entry},{s.start_s!r},{s.end_s!r}" for s in timeline.spans)
            return "\n".join(["worker,lane,entry,start_s,end_s", *spans])
        case Format.TEXT:
            return timeline_text(schedule, timeline, colour=colour, width=outputs.width())
        case Format.PERFETTO | Format.SVG | Format.PNG:
            return outputs.drawn(timeline, form)


def summary(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """Returns the numbers of a prediction, as `--json` prints them."""
    return {
        "schedule": schedule.name,
        "options": dict(schedule.options),
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "steps": schedule.steps,
        "makespan_s": timeline.makespan_s,
        "bubble_ratio": timeline.bubble_ratio,
        "span_bubble_ratio": timeline.span_bubble_ratio,
        "lower_bound_s": timeline.lower_bound_s,
        "workers": [
            {
                "worker": worker,
                "busy_s": timeline.busy_s(worker),
                "idle_s": timeline.makespan_s - timeline.busy_s(worker),
                "peak_activations": timeline.peak(worker),
                "peak_bytes": timeline.peak_bytes(worker),
                "parameter_copies": timeline.parameter_copies[worker],
            }
            for worker in range(timeline.workers)
        ],
    }
