"""Several runs below each other on one time scale: live activations as curves, or the messages of every worker.

cyclic   worker 0  [F][F][F][B][B][B]      a dark mark: a message with the gradients or parameters of a stage
                        '  '  '            a green bar: a collective
live     ▂▄▆▆▆▆▆▆▆▄▂   at most 10
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.ir.action import Op, Transfer, actions
from meshwright.ir.analysis.timeline_counts import STAGE_KINDS, live_activations
from meshwright.ir.timeline import Lane, Timeline
from meshwright.report.pictures.picture import COLLECTIVE, EDGE, HELD, IDLE, INK, LEFT, MARGIN, Area, Box, Picture, Shape, Text

PALE = {Op.F: "#a6cee3", Op.B: "#fdd49e"}
HEIGHT, LINE_HEIGHT, SPACE_BELOW, TOTAL_WIDTH, MARK = 90.0, 16.0, 34.0, 900.0, 2.0
"""Heights of a curve and of a worker's row, the space below a run, the width of a picture and of a mark."""


def live_picture(runs: Mapping[str, Timeline], *, title: str) -> Picture:
    """Draws how many stage activations all workers together hold over time, one curve for each run.

    Args:
        runs: The timelines, simulated or measured, with a name for each.
        title: A line at the top.

    Returns:
        The picture, for `to_svg` or `to_png`.
    """
    curves = {name: live_activations(timeline) for name, timeline in runs.items()}
    top = max(count for curve in curves.values() for _, count in curve)
    longest = max(timeline.makespan_s for timeline in runs.values())
    shapes: list[Shape] = []
    y = MARGIN + 30.0
    for name, curve in curves.items():
        most = max(count for _, count in curve)
        shapes.append(Text(MARGIN, y + 10, f"{name}: at most {most} stage activations", size=12, bold=True))
        shapes.append(_area(curve, y + 18 + HEIGHT, HEIGHT / top, _scale(longest), runs[name].makespan_s))
        shapes.append(Box(LEFT, y + 18 + HEIGHT - most * HEIGHT / top - 1, _scale(longest) * longest, 1, INK))
        shapes += _ends(y + 18 + HEIGHT, longest)
        y += 18 + HEIGHT + SPACE_BELOW
    return _picture(shapes, title, y)


def message_picture(runs: Mapping[str, Timeline], *, title: str) -> Picture:
    """Draws when workers send the gradients or parameters of stages: messages as marks, collectives as bars.

    Args:
        runs: The timelines, simulated or measured, with a name for each.
        title: A line at the top.

    Returns:
        The picture, for `to_svg` or `to_png`.
    """
    longest = max(timeline.makespan_s for timeline in runs.values())
    shapes: list[Shape] = []
    y = MARGIN + 30.0
    for name, timeline in runs.items():
        shapes.append(Text(MARGIN, y + 10, name, size=12, bold=True))
        y += 18
        for worker in range(timeline.workers):
            shapes += _worker(timeline, worker, y + worker * 1.6 * LINE_HEIGHT, _scale(longest))
        y += timeline.workers * 1.6 * LINE_HEIGHT
        shapes += _ends(y, longest)
        y += SPACE_BELOW
    legend = "blue: forward   yellow: backward   dark mark: a message with the state of a stage   green: a collective"
    shapes.append(Text(MARGIN, y, legend, size=11))
    return _picture(shapes, title, y + 14)


def _worker(timeline: Timeline, worker: int, y: float, scale: float) -> Iterator[Shape]:
    yield Text(LEFT - 8, y + LINE_HEIGHT - 4, f"worker {worker}", anchor="end")
    yield Box(LEFT, y, timeline.makespan_s * scale, LINE_HEIGHT, IDLE)
    own = [span for span in timeline.spans if span.worker == worker]
    for span in own:
        x, width = LEFT + span.start_s * scale, max((span.end_s - span.start_s) * scale, 0.5)
        if span.lane is Lane.COLLECTIVE:
            yield Box(x, y, max(width, MARK), LINE_HEIGHT, COLLECTIVE, str(span.entry))
        elif span.lane is Lane.COMPUTE and (found := [PALE[a.op] for a in actions(span.entry) if a.op in PALE]):
            yield Box(x, y, width, LINE_HEIGHT, found[0], str(span.entry))
    for span in own:
        if span.lane is Lane.SEND and isinstance(span.entry, Transfer) and span.entry.value.kind in STAGE_KINDS:
            yield Box(LEFT + span.start_s * scale - MARK / 2, y - 3, MARK, LINE_HEIGHT + 6, EDGE, str(span.entry))


def _area(curve: list[tuple[float, int]], base: float, unit: float, scale: float, end_s: float) -> Area:
    points, level = [(LEFT + curve[0][0] * scale, base)], 0
    for time, count in curve:
        points += [(LEFT + time * scale, base - level * unit), (LEFT + time * scale, base - count * unit)]
        level = count
    return Area((*points, (LEFT + end_s * scale, base - level * unit), (LEFT + end_s * scale, base)), HELD)


def _ends(y: float, longest: float) -> Iterator[Shape]:
    yield Text(LEFT, y + 13, "0")
    yield Text(LEFT + _scale(longest) * longest, y + 13, f"{longest:.3g} s", anchor="end")


def _scale(longest: float) -> float:
    return (TOTAL_WIDTH - LEFT - 2 * MARGIN) / longest


def _picture(shapes: list[Shape], title: str, height: float) -> Picture:
    head = Text(MARGIN, MARGIN + 12, title, size=13, bold=True)
    return Picture(TOTAL_WIDTH, height, (Box(0, 0, TOTAL_WIDTH, height, "#ffffff"), head, *shapes))
