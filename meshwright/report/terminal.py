"""A timeline in the terminal: a coloured grid with one row per worker, and a table of costs.

Colours are plain escape codes, one per action. A library that lays out text cell by cell would take longer for a large grid
than its simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.ir.action import Op, actions
from meshwright.ir.schedule import Schedule
from meshwright.ir.text_grid import columns, label
from meshwright.ir.timeline import Span, Timeline
from meshwright.report.time_grid import SYMBOLS, Bar, Paint, drawn, narrowest, ops_in

BOLD, DIM, WHITE = "1", "2", "37"
COLOURS = {Op.F: "34", Op.B: "32", Op.I: "36", Op.W: "33", Op.R: "35"}
"""Terminal colour codes: blue, green, cyan, yellow, magenta."""

WIDEST = 600
"""The most slots that are drawn as slots."""
WIDTH, NARROWEST = 120, 40
"""Default width of the grid in columns, and the smallest width."""
MEANING = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input half of a backward",
    Op.W: "weight half",
    Op.R: "recompute",
}


def timeline_text(schedule: Schedule, timeline: Timeline, *, colour: bool = False, width: int = WIDTH) -> str:
    """Returns the grid in at most `width` columns, the totals, and a line per worker."""

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour and text else text

    steps = f", {schedule.steps} rounds" if schedule.steps > 1 else ""
    size = f"{schedule.workers} workers, {schedule.stages} stages, {schedule.microbatches} microbatches{steps}"
    replicas = f", {schedule.placement.replicas} replicas" if schedule.placement.replicas > 1 else ""
    bound = f"   lower bound {timeline.lower_bound_s:.6g}" if timeline.memory else ""
    totals = (
        f"makespan {timeline.makespan_s:.6g}   bubble {timeline.bubble_ratio:.2%}   by longest span"
        f" {timeline.span_bubble_ratio:.2%}{bound}"
    )
    title = f"{paint(schedule.name, BOLD)}  {size}{replicas}"
    return "\n".join([title, *_grid(schedule, timeline, max(width, NARROWEST), paint), totals, *_table(timeline, paint)])


def _table(timeline: Timeline, paint: Paint) -> list[str]:
    """Returns what each worker does, and what it holds if known: a measured timeline has times only."""
    found: dict[str, Callable[[int], float]] = {
        "busy": timeline.busy_s,
        "idle": lambda w: timeline.makespan_s - timeline.busy_s(w),
    }
    if timeline.memory:
        found["peak activations"] = timeline.peak
    if timeline.parameter_copies:
        found["parameter copies"] = lambda w: timeline.parameter_copies[w]
    names = ("worker", *found)
    rows = [[str(w), *(f"{number(w):.6g}" for number in found.values())] for w in range(timeline.workers)]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    header, *lines = ("  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in (names, *rows))
    return [paint(header, BOLD), *lines]


def _grid(schedule: Schedule, timeline: Timeline, width: int, paint: Paint) -> list[str]:
    """Returns one line per worker under a time axis: separate slots if they fit, otherwise columns of time."""
    folded, replicas = schedule.stages > schedule.workers, schedule.placement.replicas
    bars = [
        [Bar(s.start_s, s.end_s, s.entry, label(s.entry, replicas=replicas, stages=folded), _code(s)) for s in spans]
        for spans in timeline.compute
    ]
    if timeline.makespan_s <= 0:
        rows = (" ".join(paint(bar.label, bar.code) for bar in row) for row in bars)
        return [paint("     0", DIM), *(f"{w:>3}  {row}" for w, row in enumerate(rows))]
    unit = slot_length(timeline)
    slots = None if unit is None else _slots(bars, timeline.makespan_s, unit, width, paint)
    if slots is not None:
        return [*slots, *_legend(schedule, bars, width, paint, None)]
    lines = drawn(bars, timeline.makespan_s, unit, width=width, paint=paint, dim=DIM)
    narrow = narrowest(bars, timeline.makespan_s, unit, width=width)
    return [*lines, *_legend(schedule, bars, width, paint, narrow)]


def _slots(rows: Sequence[Sequence[Bar]], makespan_s: float, unit: float, width: int, paint: Paint) -> list[str] | None:
    """Draws equal slots, each wide enough for every label; None if they do not fit."""
    count = round(makespan_s / unit)
    shown = [[bar for bar in row if bar.end_s > bar.start_s] for row in rows]
    cell = max((len(bar.label) for row in shown for bar in row), default=1)
    if 5 + count * (cell + 1) - 1 > width:
        return None
    cells = [[(round(b.start_s / unit), round((b.end_s - b.start_s) / unit), b.label) for b in row] for row in shown]
    times = [f"{slot * unit:.6g}" for slot in range(count)]
    every = next(k for k in (1, 2, 4, 5, 10, 20) if max(map(len, times)) < k * (cell + 1))
    header = "     " + "".join(f"{text:<{every * (cell + 1)}}" for text in times[::every])
    lines = [paint(header.rstrip(), DIM)]
    for w, slots in enumerate(columns(cells, count)):
        codes = [(first, first + length, bar.code) for (first, length, _), bar in zip(cells[w], shown[w], strict=True)]
        lines.append(f"{w:>3}  {_painted([f'{text:<{cell}}' for text in slots], codes, paint)}".rstrip())
    return lines


def _legend(schedule: Schedule, rows: Sequence[Sequence[Bar]], width: int, paint: Paint, narrow: int | None) -> list[str]:
    """Explains the letters and signs that occur, in lines of the given width."""
    found = ops_in(rows)
    words = [f"{op.value} {meaning}" for op, meaning in MEANING.items() if op in found]
    replicas, largest = schedule.placement.replicas, schedule.microbatches * schedule.steps - 1
    words.append("F3 of microbatch 3" if schedule.stages <= schedule.workers else "2F3 of stage 2, microbatch 3")
    words += ["= goes on", ". idle"]
    if replicas > 1:
        words.append("d, u the two pipelines" if replicas == 2 else "@2 of pipeline 2")
    if any("+" in bar.label for row in rows for bar in row):
        words.append("+ two at once")
    if narrow is not None:
        words += ["alone, 3 is F3"] * (narrow < 2) + ["spans shorter than a column may be left out"] * (narrow < 1)
        words += ["f, b of every other pipeline"] * (replicas > 1)
        if largest > 9:
            last = min(largest, len(SYMBOLS) - 1)
            words.append(f"Fa to F{SYMBOLS[last]} of microbatches 10 to {last}")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 3 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] += f" | {word}"
    return [paint(line, DIM) for line in lines]


def _painted(slots: Sequence[str], codes: Sequence[tuple[int, int, str]], paint: Paint) -> str:
    """Joins a row of slots: each (first slot, end slot, code) in its colour, gaps between them dim."""
    parts, done = [], 0
    for first, end, code in (*codes, (len(slots), len(slots), DIM)):
        if first > done:
            parts.append(paint(" ".join(slots[done:first]), DIM))
        if end > first:
            parts.append(paint(" ".join(slots[first:end]), code))
        done = end
    return " ".join(parts)


def slot_length(timeline: Timeline) -> float | None:
    """Returns the longest time that divides all starts and lengths, if the grid stays drawable."""
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
    """Returns the colour code of an action; every other replica is bold."""
    first = actions(span.entry)[0]
    code = COLOURS.get(first.op, WHITE)
    return f"{BOLD};{code}" if first.replica % 2 else code
