"""`meshwright show`: a schedule as a grid, or as a file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import inputs
from meshwright.ir.csv_form import to_csv
from meshwright.ir.files import schedule_to_json
from meshwright.passes.lower import lower
from meshwright.report.terminal import timeline_text
from meshwright.simulate import simulate


class Format(StrEnum):
    """What `show` writes."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    PERFETTO = "perfetto"


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
    send: inputs.Send = 0.0,
    costs: inputs.Costs = None,
    format: Annotated[
        Format, typer.Option(help="text, a schedule file, torch's CSV, or a trace.", rich_help_panel=inputs.OUTPUT)
    ] = Format.TEXT,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="With syncs, updates, sends and receives.", rich_help_panel=inputs.OUTPUT)
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file.", rich_help_panel=inputs.OUTPUT)] = None,
) -> None:
    """Draw a schedule: who does what when, the bubble, the peaks. Or write it as a file."""
    inputs.refuse_output(output)
    flags = inputs.CostFlags(forward, backward, split, recompute, send, file=costs)
    schedule = inputs.load(name, workers=workers, microbatches=microbatches, steps=steps, option=option, flags=flags)
    if lowered and format in (Format.JSON, Format.CSV):
        schedule = lower(schedule, costs=flags.stages(schedule), cluster=flags.cluster)
    match format:
        case Format.TEXT:
            timeline = simulate(schedule, flags.stages(schedule), flags.cluster)
            text = timeline_text(schedule, timeline, colour=output is None and inputs.coloured())
        case Format.JSON:
            text = schedule_to_json(schedule)
        case Format.CSV:
            text = to_csv(schedule)
        case Format.PERFETTO:
            from meshwright.report.perfetto import to_perfetto

            text = to_perfetto(simulate(schedule, flags.stages(schedule), flags.cluster))
    if output is None:
        typer.echo(text.rstrip("\n"), color=True)
    else:
        inputs.write(output, text.rstrip("\n") + "\n")
