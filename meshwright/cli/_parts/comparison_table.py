"""The answer of `meshwright compare`: a row for each schedule, as a table or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from meshwright.cli._parts import outputs
from meshwright.cli._parts.cost_flags import CostFlags

WIDTH = 200
"""Columns of the table at most: a narrow terminal wraps its lines, and rich would leave out columns."""


@dataclass(frozen=True)
class ComparedSchedule:
    """One schedule at the given sizes and costs, or why it cannot run with them."""

    schedule: str
    step_s: float | None = None
    makespan_s: float | None = None
    bubble_ratio: float | None = None
    parameter_copies: float | None = None
    peak_activations: float | None = None
    peak_bytes: float | None = None
    feasible: bool = False
    stale: bool = False
    recompute_priced_as_forward: bool = False
    refused: str | None = None


def csv_of(rows: Sequence[ComparedSchedule]) -> str:
    """Returns the rows as CSV."""
    found = io.StringIO()
    table = csv.writer(found, lineterminator="\n")
    table.writerow([each.name for each in fields(ComparedSchedule)])
    table.writerows(astuple(r) for r in rows)
    return found.getvalue()


def print_table(rows: Sequence[ComparedSchedule], flags: CostFlags, *, capped: bool, output: Path | None) -> None:
    """Prints the rows as a table with a legend, or writes it to a file. `capped`: say which schedules fit."""
    from rich.console import Console
    from rich.table import Table

    written = io.StringIO()
    console = Console(file=None if output is None else written, highlight=False, width=WIDTH)
    measured, profiled = flags.file is not None, flags.is_profiled
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for column in ("step s" if measured else "step", "bubble", "parameters", "activations", *(["GB"] if measured else [])):
        table.add_column(column, justify="right", no_wrap=True)
    if capped:
        table.add_column("fits")
    for r in rows:
        if r.step_s is not None and r.peak_bytes is not None:
            numbers = [f"{r.step_s:.6g}", f"{r.bubble_ratio:.2%}", f"{r.parameter_copies:.4g}", f"{r.peak_activations:.4g}"]
            numbers += [f"{r.peak_bytes / 1e9:.4g}"] if measured else []
            fits = () if not capped else ("yes" if r.feasible else "[red]no[/red]",)
            table.add_row(f"{r.schedule}{' *' * r.stale}{' r' * r.recompute_priced_as_forward}", *numbers, *fits)
    console.print(table)
    for line in _legend(rows, measured, profiled=profiled):
        console.print(f"[dim]{line}", soft_wrap=True)
    for r in rows:
        if r.refused:
            console.print(f"[dim]{r.schedule}: {r.refused}", soft_wrap=True)
    if output is not None:
        outputs.write(output, written.getvalue())


def _legend(rows: Sequence[ComparedSchedule], measured: bool, *, profiled: bool) -> list[str]:
    """Explains the columns, and the marks that occur."""
    unit = "in seconds" if measured else "in the unit of --forward"
    found = [f"step: time per step {unit}; parameters: copies that a worker holds; activations: of one microbatch, at the peak"]
    if measured:
        state = "with the state of the optimizer" if profiled else "no optimizer state"
        found.append(f"GB: activations, gradients and parameter copies of the fullest worker, 1e9 bytes; {state}")
    if any(r.stale for r in rows):
        found.append("*: stale weights: gradients are computed with older weights than those they update")
    if any(r.recompute_priced_as_forward for r in rows):
        found.append(
            "r: it recomputes, but no cost is given; one forward is assumed (--recompute-cost, or recompute_s in --costs)"
        )
    return found
