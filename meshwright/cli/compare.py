"""`meshwright compare`: every schedule side by side at equal work."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from meshwright import schedules
from meshwright.cli import inputs
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Duplex
from meshwright.ir.profile import costs_from_json
from meshwright.ir.timeline import Timeline
from meshwright.simulate import simulate as predict


@dataclass(frozen=True)
class Row:
    """One schedule at the given sizes and costs, or why it does not run at them."""

    schedule: str
    step_s: float | None = None
    makespan_s: float | None = None
    bubble_ratio: float | None = None
    parameter_copies: float | None = None
    peak_activations: float | None = None
    peak_bytes: float | None = None
    feasible: bool = False
    refused: str | None = None


def compare(
    workers: inputs.Workers = 4,
    microbatches: inputs.Microbatches = 8,
    forward: inputs.Forward = 1.0,
    backward: inputs.Backward = 2.0,
    split: inputs.Split = "1:1",
    recompute: inputs.RecomputeTime = 0.0,
    send: inputs.Send = 0.0,
    sync_cost: inputs.SyncCost = 0.0,
    bandwidth: inputs.Bandwidth = float("inf"),
    duplex: inputs.DuplexChoice = Duplex.FULL,
    costs: inputs.Costs = None,
    memory: Annotated[
        float | None,
        typer.Option(
            help="What a worker may hold: activations of one microbatch each; with --costs, bytes.",
            rich_help_panel=inputs.SIZES,
        ),
    ] = None,
    as_json: inputs.Json = False,
) -> None:
    """All schedules at equal work, fastest first: time per step, bubble, parameter copies, peak activations, what fits.

    Exit code 3: nothing fits.
    """
    flags = inputs.CostFlags(forward, backward, split, recompute, send, sync_cost, bandwidth, duplex, costs)
    if memory is not None and not memory >= 0:
        raise MeshwrightError(f"--memory must be zero or more, got {memory}")
    schedules.build("gpipe", workers=workers, microbatches=microbatches)  # sizes and costs that no schedule can take
    flags.even(stages=workers, workers=workers) if flags.file is None else costs_from_json(inputs.read(flags.file))
    rows = [
        row(name, options, workers, microbatches, flags, memory)
        for name in schedules.names()
        for options in option_sets(name, None if flags.file else memory)
    ]
    _refuse_misfit(rows, flags, workers)
    rows.sort(key=lambda r: (r.step_s is None, not r.feasible, r.step_s or 0.0, r.peak_activations or 0.0))
    if as_json:
        typer.echo(json.dumps({"workers": workers, "microbatches": microbatches, "rows": [asdict(r) for r in rows]}))
    else:
        _print(rows, memory)
    if not any(r.feasible for r in rows):
        raise typer.Exit(3)


def _refuse_misfit(rows: list[Row], flags: inputs.CostFlags, workers: int) -> None:
    """A cost file that is for no schedule's stages is one mistake, not one refusal per schedule."""
    if flags.file is None or any(not r.refused for r in rows) or all(inputs.MISFIT not in str(r.refused) for r in rows):
        return
    given = f"{len(costs_from_json(inputs.read(flags.file)))} {inputs.MISFIT}"
    raise MeshwrightError(
        f"--costs {flags.file} fits no schedule: {workers} workers have {workers} stages or a multiple, which {given}",
        fix=f"one row per stage: {workers}",
    )


def option_sets(name: str, memory: float | None) -> list[dict[str, object]]:
    """The options worth comparing; with a cap also those under which the schedule keeps to it by itself."""
    found = list(schedules.compared(name))
    under = schedules.capped(name)
    if memory is not None and memory >= 1 and under is not None:
        found.append({**under, "memory": int(memory)})
    return found


def row(
    name: str, options: dict[str, object], workers: int, microbatches: int, flags: inputs.CostFlags, memory: float | None
) -> Row:
    """Simulate one schedule; where it has no flush, a step costs what one more of them adds."""
    title = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
    text = [f"{key}={value}" for key, value in options.items()]

    def run(steps: int | None) -> Timeline:
        schedule = inputs.load(
            name, workers=workers, microbatches=microbatches, steps=steps, option=text, flags=flags, spread=True
        )
        flags.refuse_ring(schedule.ring)
        return predict(schedule, flags.spread(schedule), flags.cluster)

    try:
        timeline = run(None)
        step_s = timeline.makespan_s if timeline.flush else run(5).makespan_s - run(4).makespan_s
    except MeshwrightError as error:
        return Row(title, refused=error.what)
    peak, size = max(timeline.peak(w) for w in range(workers)), max(timeline.peak_bytes(w) for w in range(workers))
    return Row(
        title,
        step_s,
        timeline.makespan_s,
        timeline.bubble_ratio,
        max(timeline.parameter_copies),
        peak,
        size,
        memory is None or (peak if flags.file is None else size) <= memory + 1e-9,
    )


def _print(rows: list[Row], memory: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for column in ("step", "bubble", "parameters", "activations"):
        table.add_column(column, justify="right", no_wrap=True)
    if memory is not None:
        table.add_column("fits")
    for r in rows:
        if r.step_s is not None:
            fits = () if memory is None else ("yes" if r.feasible else "[red]no[/red]",)
            numbers = (f"{r.step_s:.6g}", f"{r.bubble_ratio:.2%}", f"{r.parameter_copies:.4g}", f"{r.peak_activations:.4g}")
            table.add_row(r.schedule, *numbers, *fits)
    console.print(table)
    for r in rows:
        if r.refused:
            console.print(f"[dim]{r.schedule}: {r.refused}", soft_wrap=True)
