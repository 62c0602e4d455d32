"""`meshwright show`: a schedule as a grid, or as a file."""

from __future__ import annotations

from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import inputs
from meshwright.ir.csv_form import to_csv
from meshwright.ir.files import schedule_to_json
from meshwright.ir.schedule import Schedule
from meshwright.passes.lower import lower
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
    flags = inputs.CostFlags(forward, backward, split, recompute, send, file=costs)
    schedule = inputs.load(name, workers=workers, microbatches=microbatches, steps=steps, option=option, flags=flags)
    if format is Format.TEXT:
        _print(schedule, flags, output)
        return
    if lowered and format is not Format.PERFETTO:
        schedule = lower(schedule, costs=flags.stages(schedule), cluster=flags.cluster)
    match format:
        case Format.JSON:
            text = schedule_to_json(schedule)
        case Format.CSV:
            text = to_csv(schedule)
        case Format.PERFETTO:
            from meshwright.report.perfetto import to_perfetto

            text = to_perfetto(simulate(schedule, flags.stages(schedule), flags.cluster))
    if output is None:
        typer.echo(text.rstrip("\n"))
    else:
        inputs.write(output, text.rstrip("\n") + "\n")


def _print(schedule: Schedule, flags: inputs.CostFlags, output: Path | None) -> None:
    from rich.console import Console

    from meshwright.report.terminal import print_timeline

    timeline = simulate(schedule, flags.stages(schedule), flags.cluster)
    if output is None:
        print_timeline(Console(highlight=False), schedule, timeline)
        return
    drawn = StringIO()
    print_timeline(Console(file=drawn, highlight=False, width=10_000), schedule, timeline)
    inputs.write(output, "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n")
