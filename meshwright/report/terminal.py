"""A timeline in the terminal: a coloured grid with one row per worker, and what it costs.

Colours are written as plain escape codes, one per action: a library that lays out text cell by cell takes longer over a
large grid than its simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.ir.action import Op, actions
from meshwright.ir.grid import columns, label
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Span, Timeline

BOLD, DIM, WHITE = "1", "2", "37"
COLOURS = {Op.F: "34", Op.B: "32", Op.I: "36", Op.W: "33", Op.R: "35"}
"""Codes of the terminal: blue, green, cyan, yellow, magenta."""

WIDEST = 600
"""More slots than this are not drawn on a time axis."""

Paint = Callable[[str, str], str]
"""(text, code) -> the text in that colour."""


def timeline_text(schedule: Schedule, timeline: Timeline, *, colour: bool = False) -> str:
    """The grid, the totals, and a line per worker."""

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour and text else text

    steps = f", {schedule.steps} rounds" if schedule.steps > 1 else ""
    size = f"{schedule.workers} workers, {schedule.stages} stages, {schedule.microbatches} microbatches{steps}"
    replicas = f", {schedule.placement.replicas} replicas" if schedule.placement.replicas > 1 else ""
    totals = (
        f"makespan {timeline.makespan_s:.6g}   bubble {timeline.bubble_ratio:.2%}   by longest span"
        f" {timeline.span_bubble_ratio:.2%}   lower bound {timeline.lower_bound_s:.6g}"
    )
    title = f"{paint(schedule.name, BOLD)}  {size}{replicas}"
    return "\n".join([title, *_grid(schedule, timeline, paint), totals, *_table(timeline, paint)])


def _table(timeline: Timeline, paint: Paint) -> list[str]:
    """What each worker does and holds."""
    names = ("worker", "busy", "idle", "peak activations", "parameter copies")
    rows = []
    for w in range(timeline.workers):
        busy = timeline.busy_s(w)
        numbers = (busy, timeline.makespan_s - busy, timeline.peak(w), timeline.parameter_copies[w])
        rows.append([str(w), *(f"{number:.6g}" for number in numbers)])
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    header, *lines = ("  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in (names, *rows))
    return [paint(header, BOLD), *lines]


def _grid(schedule: Schedule, timeline: Timeline, paint: Paint) -> list[str]:
    """One line per worker on a time axis of equal slots; without a common slot length, entries in order."""
    folded, replicas = schedule.stages > schedule.workers, schedule.placement.replicas

    def name(span: Span) -> str:
        return label(span.entry, replicas=replicas, stages=folded)

    unit = slot_length(timeline)
    if unit is None:
        rows = (" ".join(paint(name(span), _code(span)) for span in spans) for spans in timeline.compute)
        return [f"{w:>3}  {row}" for w, row in enumerate(rows)]
    width = round(timeline.makespan_s / unit)
    drawn = [[span for span in spans if span.end_s > span.start_s] for spans in timeline.compute]
    cells = [[(round(s.start_s / unit), round((s.end_s - s.start_s) / unit), name(s)) for s in spans] for spans in drawn]
    table = columns(cells, width)
    cell = max((len(text) for row in table for text in row), default=1)
    header = "     " + "".join(f"{slot:<{cell + 1}}" for slot in range(width))
    lines = [paint(header.rstrip(), DIM)]
    for w, slots in enumerate(table):
        codes = [(first, first + length, _code(span)) for (first, length, _), span in zip(cells[w], drawn[w], strict=True)]
        lines.append(f"{w:>3}  {_painted([f'{text:<{cell}}' for text in slots], codes, paint)}".rstrip())
    return lines


def _painted(slots: Sequence[str], codes: Sequence[tuple[int, int, str]], paint: Paint) -> str:
    """A row of slots: each (first slot, slot behind the last, code) in its colour, gaps between them dim."""
    parts, done = [], 0
    for first, behind, code in (*codes, (len(slots), len(slots), DIM)):
        if first > done:
            parts.append(paint(" ".join(slots[done:first]), DIM))
        if behind > first:
            parts.append(paint(" ".join(slots[first:behind]), code))
        done = behind
    return " ".join(parts)


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


def _code(span: Span) -> str:
    """The colour of an action; those of every other replica are bold."""
    first = actions(span.entry)[0]
    code = COLOURS.get(first.op, WHITE)
    return f"{BOLD};{code}" if first.replica % 2 else code
