"""A timeline as a picture: one row per worker to scale, what each worker holds below, and a legend.

    worker 0  [F0][F1]      [B0   ][B1   ]
    worker 1      [F0][B0   ][F1][B1   ]
              0       5        10
    held 0    ▂▄▄▄▄▄▄▄▄▄▄▂▂▂

The picture is a list of shapes in pixels. `to_svg` writes them as text without any library, `to_png` draws them with
matplotlib. Colours are those of Okabe and Ito, which are safe for colour-blind readers. Actions of every other replica are
lighter and have a dark edge on top, so that they also differ in greyscale. Halves of a microbatch, and the two actions of a
cell, take half of the row's height.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Cell, Entry, Op, actions
from meshwright.ir.text_grid import label
from meshwright.ir.timeline import Lane, Span, Timeline
from meshwright.report.time_grid import round_step

COLOURS = {Op.F: "#0072b2", Op.B: "#e69f00", Op.I: "#d55e00", Op.W: "#cc79a7", Op.R: "#5c5c5c"}
COLLECTIVE, HELD, IDLE, EDGE, INK = "#009e73", "#9ecae1", "#eeeeee", "#1a1a1a", "#1a1a1a"
NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward, input half", Op.W: "backward, weight half", Op.R: "recompute"}

ROW, GAP, THIN, STRIP, MARGIN, LEFT, RIGHT = 26, 5, 4, 22, 12, 62, 96
"""Heights of a row, of the space below it, of a collective and of a memory strip; margin; space on the left and right."""
CHARACTER = 6.2
"""Width of a character in the label font."""
FEW = 36
"""The most actions of a worker for which 900 pixels have room for labels."""
REAL_BYTES = 1000
"""Below this, costs are in units of one activation, and activations are drawn instead of bytes."""
MOST_SPANS = 200_000
"""The most spans that viewers can show."""


class Box(NamedTuple):
    """A filled rectangle; viewers show `title` when the pointer is on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


class Text(NamedTuple):
    """A line of text with its baseline at y; anchor is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: int = 11
    fill: str = INK
    bold: bool = False


class Area(NamedTuple):
    """A filled outline."""

    points: tuple[tuple[float, float], ...]
    fill: str


Shape = Box | Text | Area


@dataclass(frozen=True)
class Picture:
    """Shapes in drawing order, and the size of the picture in pixels."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def picture(timeline: Timeline, *, title: str = "", width: int | None = None) -> Picture:
    """Draws a timeline, predicted or measured.

    Args:
        timeline: What to draw; its memory is drawn if it has any.
        title: A line at the top; the schedule's name and its totals if empty.
        width: Total width in pixels; default 900, which fits a page, or 1400 for long lists.

    Returns:
        The picture, for `to_svg` or `to_png`.

    Raises:
        MeshwrightError: The timeline has no duration, or more spans than a viewer can show.
    """
    if timeline.makespan_s <= 0:
        raise MeshwrightError(f"{timeline.schedule} takes no time, so there is nothing to draw", fix="costs above zero")
    if len(timeline.spans) > MOST_SPANS:
        raise MeshwrightError(
            f"{timeline.schedule} has {len(timeline.spans)} spans, the limit of a picture is {MOST_SPANS}",
            fix="--format perfetto, or fewer microbatches",
        )
    if width is None:
        width = 900 if max(map(len, timeline.compute)) <= FEW else 1400
    if width < 400:
        raise MeshwrightError(f"a picture is at least 400 pixels wide, got {width}", fix="width=1200")
    scale = (width - LEFT - RIGHT) / timeline.makespan_s
    top = MARGIN + 24.0
    shapes: list[Shape] = [Text(MARGIN, MARGIN + 12, title or _title(timeline), size=13, bold=True)]
    shapes += _rows(timeline, top, scale)
    at = top + timeline.workers * (ROW + GAP)
    shapes += _axis(timeline.makespan_s, at, scale)
    at += 24
    if any(timeline.memory):
        shapes += _memory(timeline, at, scale)
        at += timeline.workers * (STRIP + GAP) + 20
    legend, lines = _legend(timeline, at, width)
    shapes += legend
    height = at + lines * 18 + MARGIN
    return Picture(width, height, (Box(0, 0, width, height, "#ffffff"), *shapes))


def _title(timeline: Timeline) -> str:
    return (
        f"{timeline.schedule}: {timeline.workers} workers, makespan {timeline.makespan_s:.6g}, "
        f"{timeline.bubble_ratio:.1%} {'of it idle' if timeline.flush else 'idle between fill and drain'}"
    )


def _rows(timeline: Timeline, top: float, scale: float) -> Iterator[Shape]:
    """Yields actions on a grey background, which shows idle time, and collectives as thin bars along the lower edge."""
    found = [a for spans in timeline.compute for span in spans for a in actions(span.entry)]
    replicas = max((a.replica for a in found), default=0) + 1
    staged = any(_holds_several(spans) for spans in timeline.compute)
    for worker in range(timeline.workers):
        y = top + worker * (ROW + GAP)
        yield Text(LEFT - 8, y + ROW / 2 + 4, f"worker {worker}", anchor="end")
        yield Box(LEFT, y, timeline.makespan_s * scale, ROW, IDLE)
        for span in (s for s in timeline.compute[worker] if s.end_s > s.start_s):
            yield from _action(span, y, scale, replicas, staged=staged)
    for span in timeline.spans:
        if span.lane is Lane.COLLECTIVE and span.end_s > span.start_s:
            y = top + span.worker * (ROW + GAP) + ROW - THIN
            length = (span.end_s - span.start_s) * scale
            yield Box(LEFT + span.start_s * scale, y, length, THIN, COLLECTIVE, _hover(span))


def _holds_several(spans: Sequence[Span]) -> bool:
    """True if a worker runs several stages of one replica, so that labels must name the stage."""
    stages = {(a.replica, a.stage) for span in spans for a in actions(span.entry)}
    return len(stages) > len({replica for replica, _ in stages})


def _action(span: Span, y: float, scale: float, replicas: int, *, staged: bool) -> Iterator[Shape]:
    """Yields the shapes of one span: whole, or as the two halves that share it."""
    x, width = LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    for entry, offset, height in _halves(span.entry):
        fill = _colour(entry)
        yield Box(x, y + offset, max(width - 0.6, 0.3), height, fill, _hover(span))
        if entry.replica % 2:
            yield Box(x, y + offset, max(width - 0.6, 0.3), min(3, height / 4), EDGE)
        text = _fitting(entry, width, replicas, staged=staged)
        if text:
            small = height < ROW
            ink = "#ffffff" if _is_dark(fill) else INK
            middle = y + offset + height / 2 + (3 if small else 4)
            yield Text(x + width / 2, middle, text, "middle", 9 if small else 11, ink)


def _halves(entry: Entry) -> Iterator[tuple[Action, float, float]]:
    """Yields (action, offset from the top of the row, height). Actions of a cell and halves of a microbatch get half a row."""
    if isinstance(entry, Cell):
        yield entry.first, 0.0, ROW / 2
        yield entry.second, ROW / 2, ROW / 2
    elif isinstance(entry, Action):
        half = entry.part >= 0
        yield entry, (ROW / 2 if entry.part % 2 else 0.0) if half else 0.0, ROW / 2 if half else ROW


def _fitting(entry: Action, width: float, replicas: int, *, staged: bool) -> str:
    """Returns the longest label that fits: full label, op and microbatch, microbatch, or nothing."""
    choices = (label(entry, replicas=replicas, stages=staged), f"{entry.op.value}{entry.mb}", str(entry.mb))
    return next((text for text in choices if len(text) * CHARACTER + 2 <= width), "")


def _colour(entry: Action) -> str:
    """Returns the colour of an action; for every other replica it is mixed with white."""
    colour = COLOURS[entry.op]
    if entry.replica % 2 == 0:
        return colour
    mixed = (round(0.5 * int(colour[at : at + 2], 16) + 0.5 * 255) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _is_dark(colour: str) -> bool:
    """True if white text is easier to read on this colour than black."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _hover(span: Span) -> str:
    return f"{span.entry} on worker {span.worker}: {span.start_s:.6g} to {span.end_s:.6g}"


def _axis(makespan_s: float, y: float, scale: float) -> Iterator[Shape]:
    """Yields times at round distances, about 100 pixels apart."""
    step = round_step(100 / scale)
    for tick in range(ceil(makespan_s / step + 1e-9)):
        x = LEFT + tick * step * scale
        yield Box(x, y, 1, 4, INK)
        yield Text(x, y + 15, f"{tick * step:.6g}", "middle")


def _memory(timeline: Timeline, top: float, scale: float) -> Iterator[Shape]:
    """Yields what each worker holds over time, all strips on one scale, with the peak next to each."""
    levels_of_all = [level for levels in timeline.memory for level in levels]
    in_bytes = max((level.bytes for level in levels_of_all), default=0.0) >= REAL_BYTES
    tallest = max((level.bytes if in_bytes else level.activations for level in levels_of_all), default=0.0)
    yield Text(MARGIN, top + 10, f"held by each worker, in {'bytes' if in_bytes else 'activations of one microbatch'}")
    top += 16
    for worker, levels in enumerate(timeline.memory):
        base = top + worker * (STRIP + GAP) + STRIP
        values = [(level.time_s, level.bytes if in_bytes else level.activations) for level in levels]
        yield Text(LEFT - 8, base - STRIP / 2 + 4, f"worker {worker}", anchor="end")
        yield Box(LEFT, base, timeline.makespan_s * scale, 0.6, INK)
        if tallest > 0 and values:
            outline = _steps(values, timeline.makespan_s)
            yield Area(tuple((LEFT + t * scale, base - max(v, 0.0) / tallest * STRIP) for t, v in outline), HELD)
            peak = max(v for _, v in values)
            yield Text(LEFT + timeline.makespan_s * scale + 6, base - STRIP / 2 + 4, _size(peak) if in_bytes else f"{peak:.4g}")


def _steps(values: Sequence[tuple[float, float]], end: float) -> Iterator[tuple[float, float]]:
    """Yields the outline under a step curve, from zero back to zero."""
    held = 0.0
    yield values[0][0], 0.0
    for time, value in values:
        yield min(time, end), held
        yield min(time, end), value
        held = value
    yield end, held
    yield end, 0.0


def _size(count: float) -> str:
    """Returns bytes with a unit."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= power:
            return f"{count / power:.3g} {unit}"
    return f"{count:.3g} B"


def _legend(timeline: Timeline, top: float, width: int) -> tuple[list[Shape], int]:
    """Returns the legend of everything that occurs, and its number of lines."""
    found = [a for spans in timeline.compute for span in spans for a in actions(span.entry)]
    entries = [(COLOURS[op], name, False) for op, name in NAMES.items() if any(a.op is op for a in found)]
    if any(a.replica % 2 for a in found):
        entries.append((_colour(Action(Op.F, 0, 0, 1)), "of the second pipeline: lighter, with an edge", True))
    if any(span.lane is Lane.COLLECTIVE and span.end_s > span.start_s for span in timeline.spans):
        entries.append((COLLECTIVE, "gradient sync", False))
    entries.append((IDLE, "idle", False))
    if any(a.part >= 0 for a in found):
        entries.append(("#ffffff", "a, b: the halves of a microbatch", False))
    shapes: list[Shape] = []
    x, line = float(MARGIN), 0
    for colour, name, edged in entries:
        needed = 30 + len(name) * CHARACTER
        if x + needed > width - MARGIN and x > MARGIN:
            x, line = float(MARGIN), line + 1
        y = top + line * 18
        shapes.append(Box(x, y, 14, 12, colour))
        if edged:
            shapes.append(Box(x, y, 14, 3, EDGE))
        shapes.append(Text(x + 20, y + 10, name))
        x += needed + 12
    return shapes, line + 1
