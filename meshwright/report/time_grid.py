"""Rows of time: every column has the same duration, and the grid fits a given width.

    0         10        20
  0 0123.......B0=4B1=5B2=
  1 .0123....B0=4B1=5B2=.

A span is as many columns wide as it is long, and has its label if that fits. If spans would be narrower than a column, the
time axis continues below, in several bands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from meshwright.ir.action import Action, Cell, Entry, Op, actions
from meshwright.ir.text_grid import GOES_ON, IDLE

MOST_BANDS = 8
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""A microbatch as one character."""

Paint = Callable[[str, str], str]
"""(text, code) -> the text in that colour."""


class Bar(NamedTuple):
    """A span to draw: its times, its entry, its label and its colour."""

    start_s: float
    end_s: float
    entry: Entry
    label: str
    code: str


class Scale(NamedTuple):
    """How time maps to columns: `bands` bands of `columns` columns, each column of `column_s`."""

    column_s: float
    columns: int
    bands: int


def drawn(
    rows: Sequence[Sequence[Bar]], makespan_s: float, slot_s: float | None, *, width: int, paint: Paint, dim: str
) -> list[str]:
    """Returns the bands, each with its time axis and one line per worker."""
    prefix = _prefix(rows)
    scale = scaled(rows, makespan_s, slot_s, width=width - prefix)
    cells = [_cells(row, scale) for row in rows]
    lines = []
    for band in range(scale.bands):
        first = band * scale.columns
        last = min(first + scale.columns, ceil(makespan_s / scale.column_s - 1e-6))
        lines.append(paint((" " * prefix + axis(scale, first, last)).rstrip(), dim))
        for worker, row in enumerate(cells):
            lines.append(f"{worker:>{prefix - 1}} {_line(row[first:last], paint, dim)}")
    return lines


def _prefix(rows: Sequence[Sequence[Bar]]) -> int:
    """Returns the columns before the first time: a worker's number and a space."""
    return len(str(len(rows) - 1)) + 1


def scaled(rows: Sequence[Sequence[Bar]], makespan_s: float, slot_s: float | None, *, width: int) -> Scale:
    """Returns the fewest bands in which short spans fill a column, or one band more if spans are then wide enough for a label.

    If times have a common slot, it is a whole number of columns wide.
    """
    lengths = sorted(bar.end_s - bar.start_s for row in rows for bar in row if bar.end_s > bar.start_s)
    shortest = next(length for length in lengths if length >= sum(lengths) / len(lengths) / 8)
    slots = makespan_s / shortest if slot_s is None else round(makespan_s / slot_s)
    wide = {bands: int(width // (ceil(slots / bands) if slot_s else slots / bands)) for bands in range(1, MOST_BANDS + 1)}
    bands = next((b for b, columns in wide.items() if columns), MOST_BANDS)
    bands = next((b for b in (bands, bands + 1) if wide.get(b, 0) > 1), bands)
    if slot_s is not None and wide[bands]:
        return Scale(slot_s / wide[bands], ceil(slots / bands) * wide[bands], bands)
    return Scale(makespan_s / (bands * width), width, bands)


def axis(scale: Scale, first: int, last: int) -> str:
    """Returns times at round distances, each above its column."""
    distance = round_step(scale.column_s * 10)
    line = ""
    tick = ceil(first * scale.column_s / distance - 1e-9)
    while (at := round(tick * distance / scale.column_s) - first) < last - first:
        text = f"{tick * distance:.6g}"
        if at >= len(line) + bool(line) and at + len(text) <= last - first:
            line = f"{line:<{at}}{text}"
        tick += 1
    return line or f"{first * scale.column_s:.6g}"


def round_step(least: float) -> float:
    """Returns the smallest of 1, 2, 5, 10, 20, 50, ... (times a power of ten) that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))


def _cells(row: Sequence[Bar], scale: Scale) -> list[tuple[str, str]]:
    """Returns one (character, colour) per column; a span shorter than a column takes a free one."""
    found = [(IDLE, "")] * (scale.columns * scale.bands)
    for bar in row:
        begin, end = round(bar.start_s / scale.column_s), round(bar.end_s / scale.column_s)
        begin = min(begin, len(found) - 1)
        if bar.end_s > bar.start_s and (end > begin or found[begin][0] == IDLE):
            text = shortened(bar, max(end - begin, 1))
            found[begin : begin + len(text)] = [(character, bar.code) for character in text]
    return found


def shortened(bar: Bar, columns: int) -> str:
    """Returns as much of a label as fits, padded to the length of its span."""
    if len(bar.label) <= columns:
        return bar.label.ljust(columns, GOES_ON)
    if columns == 1:
        only_microbatch = isinstance(bar.entry, Action) and bar.entry.op is Op.F and bar.entry.mb < len(SYMBOLS)
        return _short(bar.entry)[-1 if only_microbatch else 0]
    text = _short(bar.entry)
    return (text if len(text) <= columns else text[0]).ljust(columns, GOES_ON)


def _short(entry: Entry) -> str:
    """Returns a letter (small for every other replica) and the microbatch as one character; a cell has + between two."""
    if isinstance(entry, Cell):
        return f"{_short(entry.first)}+{_short(entry.second)}"
    if not isinstance(entry, Action):
        return str(entry)
    letter = entry.op.value.lower() if entry.replica % 2 else entry.op.value
    return letter + (SYMBOLS[entry.mb] if 0 <= entry.mb < len(SYMBOLS) else "")


def narrowest(rows: Sequence[Sequence[Bar]], makespan_s: float, slot_s: float | None, *, width: int) -> int | None:
    """Returns the fewest columns of a span whose label is shortened; None if all labels fit."""
    scale = scaled(rows, makespan_s, slot_s, width=width - _prefix(rows))
    shown = [(bar, round(bar.end_s / scale.column_s) - round(bar.start_s / scale.column_s)) for row in rows for bar in row]
    return min((columns for bar, columns in shown if len(bar.label) > columns and bar.end_s > bar.start_s), default=None)


def ops_in(rows: Sequence[Sequence[Bar]]) -> set[Op]:
    """Returns the kinds of action that occur."""
    return {action.op for row in rows for bar in row for action in actions(bar.entry)}


def _line(cells: Sequence[tuple[str, str]], paint: Paint, dim: str) -> str:
    """Joins columns to a text; runs of one colour are painted together."""
    parts: list[str] = []
    done = 0
    for index in range(1, len(cells) + 1):
        if index == len(cells) or cells[index][1] != cells[done][1]:
            parts.append(paint("".join(character for character, _ in cells[done:index]), cells[done][1] or dim))
            done = index
    return "".join(parts)
