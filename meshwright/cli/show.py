"""`meshwright show`: a schedule as a grid, as a picture, or as a file."""

from __future__ import annotations

import json
from typing import Annotated

from meshwright.cli._parts import cost_flags, inputs, outputs
from meshwright.cli._parts.flag_groups import with_groups
from meshwright.cli._parts.outputs import Format
from meshwright.cli.simulate import predicted, summary
from meshwright.ir.files.schedule_csv import to_csv
from meshwright.ir.files.schedule_json import schedule_to_json
from meshwright.ir.schedule import Schedule
from meshwright.passes.lower import lower
from meshwright.simulate import simulate


@with_groups
def show(
    name: inputs.Name,
    *,
    workers: inputs.Workers = 4,
    microbatches: inputs.Microbatches = 4,
    steps: inputs.Steps = None,
    option: inputs.Option = None,
    flags: cost_flags.CostFlags,
    format: inputs.FormatChoice = Format.TEXT,
    lowered: Annotated[bool, inputs.output_option("--lowered", help="Include syncs, updates, sends and receives.")] = False,
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """Draw a schedule: what every worker does when, the bubble, the peaks. Or write it to a file.

    A file with a timeline (`simulate --format json`) is drawn as a picture or a trace.
    """
    outputs.refuse_output(output)
    outputs.refuse_binary(format, output)
    if (timeline := inputs.timeline_file(name)) is not None:
        outputs.give(outputs.drawn(timeline, format), output)
        return
    schedule = inputs.load(name, workers=workers, microbatches=microbatches, steps=steps, option=option, flags=flags)
    flags.refuse_ring(schedule.ring)
    if lowered and format in (Format.JSON, Format.CSV):
        schedule = lower(schedule, costs=flags.stages(schedule), cluster=flags.cluster)
    if as_json:
        timeline = simulate(schedule, flags.stages(schedule), flags.cluster, overlap=flags.overlap)
        outputs.give(json.dumps(summary(schedule, timeline)), output)
        return
    outputs.give(_form(schedule, flags, format, colour=output is None and outputs.coloured()), output)


def _form(schedule: Schedule, flags: cost_flags.CostFlags, form: Format, *, colour: bool) -> str | bytes:
    """Returns a schedule in one of the formats; simulates it for formats that show times."""
    if form is Format.JSON:
        return schedule_to_json(schedule)
    if form is Format.CSV:
        return to_csv(schedule)
    timeline = simulate(schedule, flags.stages(schedule), flags.cluster, overlap=flags.overlap)
    return predicted(schedule, timeline, form, colour=colour)
