"""`meshwright show`: a schedule as a grid, or as a file."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshwright.cli import inputs, outputs
from meshwright.cli.inputs import Format
from meshwright.cli.simulate import summary
from meshwright.ir.cluster import Duplex
from meshwright.ir.csv_form import to_csv
from meshwright.ir.files import schedule_to_json
from meshwright.ir.schedule import Schedule
from meshwright.passes.lower import lower
from meshwright.report.terminal import timeline_text
from meshwright.simulate import simulate


def show(
    name: inputs.Name,
    workers: inputs.Workers = 4,
    microbatches: inputs.Microbatches = 4,
    steps: inputs.Steps = None,
    option: inputs.Option = None,
    forward: inputs.Forward = 1.0,
    backward: inputs.Backward = 2.0,
    split: inputs.Split = "1:1",
    recompute: inputs.RecomputeTime = 0.0,
    old_recompute: inputs.OldRecompute = None,
    send: inputs.Send = 0.0,
    sync_cost: inputs.SyncCost = 0.0,
    bandwidth: inputs.Bandwidth = float("inf"),
    duplex: inputs.DuplexChoice = Duplex.FULL,
    overlap: inputs.Overlap = 0.0,
    costs: inputs.Costs = None,
    cluster: inputs.ClusterFile = None,
    format: inputs.FormatChoice = Format.TEXT,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="With syncs, updates, sends and receives.", rich_help_panel=inputs.OUTPUT)
    ] = False,
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """Draw a schedule: who does what when, the bubble, the peaks. Or write it as a file."""
    outputs.refuse_output(output)
    recompute = inputs.recompute_cost(recompute, old_recompute)
    flags = inputs.CostFlags(forward, backward, split, recompute, send, sync_cost, bandwidth, duplex, costs, cluster)
    schedule = inputs.load(name, workers=workers, microbatches=microbatches, steps=steps, option=option, flags=flags)
    flags.refuse_ring(schedule.ring)
    if lowered and format in (Format.JSON, Format.CSV):
        schedule = lower(schedule, costs=flags.stages(schedule), cluster=flags.cluster)
    if as_json:
        timeline = simulate(schedule, flags.stages(schedule), flags.cluster, overlap=overlap)
        outputs.give(json.dumps(summary(schedule, timeline)), output)
        return
    outputs.give(_text(schedule, flags, overlap, format, colour=output is None and outputs.coloured()), output)


def _text(schedule: Schedule, flags: inputs.CostFlags, overlap: float, form: Format, *, colour: bool) -> str:
    """A schedule in one of the forms; times are simulated for those that have any."""
    match form:
        case Format.JSON:
            return schedule_to_json(schedule)
        case Format.CSV:
            return to_csv(schedule)
        case Format.PERFETTO:
            from meshwright.report.perfetto import to_perfetto

            return to_perfetto(simulate(schedule, flags.stages(schedule), flags.cluster, overlap=overlap))
        case Format.TEXT:
            timeline = simulate(schedule, flags.stages(schedule), flags.cluster, overlap=overlap)
            return timeline_text(schedule, timeline, colour=colour, width=outputs.width())
