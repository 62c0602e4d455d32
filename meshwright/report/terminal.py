"""A timeline in the terminal: a coloured grid with one row per worker, and what it costs."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.ir.action import Op, actions
from meshwright.ir.grid import GOES_ON, IDLE, columns, label
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Span, Timeline

COLOURS = {Op.F: "blue", Op.B: "green", Op.I: "cyan", Op.W: "yellow", Op.R: "magenta"}
WIDEST = 600
"""More slots than this are not drawn on a time axis."""


def print_timeline(console: Console, schedule: Schedule, timeline: Timeline) -> None:
    """The grid, the totals, and a line per worker."""
    steps = f", {schedule.steps} rounds" if schedule.steps > 1 else ""
    size = f"{schedule.workers} workers, {schedule.stages} stages, {schedule.microbatches} microbatches{steps}"
    replicas = f", {schedule.placement.replicas} replicas" if schedule.placement.replicas > 1 else ""
    console.print(Text.assemble((schedule.name, "bold"), f"  {size}{replicas}"))
    for line in grid_lines(schedule, timeline):
        console.print(line, soft_wrap=True)
    console.print(
        f"makespan {timeline.makespan_s:.6g}   bubble {timeline.bubble_ratio:.2%}   by longest span"
        f" {timeline.span_bubble_ratio:.2%}   lower bound {timeline.lower_bound_s:.6g}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "busy", "idle", "peak activations", "parameter copies"):
        table.add_column(name, justify="right")
    for w in range(timeline.workers):
        busy = timeline.busy_s(w)
        row = (busy, timeline.makespan_s - busy, timeline.peak(w), timeline.parameter_copies[w])
        table.add_row(str(w), *(f"{number:.6g}" for number in row))
    console.print(table)


def grid_lines(schedule: Schedule, timeline: Timeline) -> list[Text]:
    """One line per worker on a time axis of equal slots; without a common slot length, entries in order."""
    folded = schedule.stages > schedule.workers
    replicas = schedule.placement.replicas

    def name(span: Span) -> str:
        return label(span.entry, replicas=replicas, stages=folded)

    unit = slot_length(timeline)
    if unit is None:
        return [_line(w, [(name(span), span) for span in spans], 0) for w, spans in enumerate(timeline.compute)]
    width = round(timeline.makespan_s / unit)
    rows = [
        [(round(s.start_s / unit), round((s.end_s - s.start_s) / unit), name(s)) for s in spans if s.end_s > s.start_s]
        for spans in timeline.compute
    ]
    table = columns(rows, width)
    starts = [{round(s.start_s / unit): s for s in spans} for spans in timeline.compute]
    cell = max((len(text) for row in table for text in row), default=1)
    header = Text("     " + "".join(f"{slot:<{cell + 1}}" for slot in range(width)), style="dim")
    lines = [header]
    for w, row in enumerate(table):
        shown: list[tuple[str, Span | None]] = []
        current: Span | None = None
        for slot, text in enumerate(row):
            current = None if text == IDLE else starts[w].get(slot, current) if text != GOES_ON else current
            shown.append((text, current))
        lines.append(_line(w, shown, cell))
    return lines


def slot_length(timeline: Timeline) -> float | None:
    """The longest time of which all starts and lengths are whole multiples, if the grid stays drawable."""
    lengths = sorted({round(s.end_s - s.start_s, 9) for spans in timeline.compute for s in spans if s.end_s > s.start_s})
    if not lengths:
        return None
    times = {s.start_s for spans in timeline.compute for s in spans} | set(lengths) | {timeline.makespan_s}
    for parts in (1, 2, 3, 4, 6):
        unit = lengths[0] / parts
        if timeline.makespan_s / unit <= WIDEST and all(abs(t / unit - round(t / unit)) < 1e-4 for t in times):
            return unit
    return None


def _line(worker: int, cells: list[tuple[str, Span | None]], width: int) -> Text:
    line = Text(f"{worker:>3}  ")
    for text, span in cells:
        line.append(f"{text:<{width + 1}}" if width else f"{text} ", style=_style(span) if text != IDLE else "dim")
    return line


def _style(span: Span | None) -> str:
    if span is None:
        return "dim"
    first = actions(span.entry)[0]
    strong = "bold " if first.replica % 2 else ""
    return strong + COLOURS.get(first.op, "white")
