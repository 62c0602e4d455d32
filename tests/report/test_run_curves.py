"""Curves of several runs: the numbers in the picture are those of the timelines, and every message has a mark."""

from __future__ import annotations

from meshwright import Timeline, even_costs, lower, schedules, simulate
from meshwright.report.pictures.picture import EDGE, Box, Text
from meshwright.report.pictures.run_curves import LINE_HEIGHT, live_picture, message_picture
from meshwright.report.pictures.svg import to_svg


def cyclic(n: int, rounds: int) -> Timeline:
    costs = even_costs(stages=n, workers=n, forward_s=1.0, backward_s=1.0)
    return simulate(lower(schedules.build("cyclic", workers=n, microbatches=n, steps=rounds)), costs)


def test_curves_say_their_maximum() -> None:
    made = live_picture({"two": cyclic(2, 3), "three": cyclic(3, 3)}, title="live")
    texts = [shape.text for shape in made.shapes if isinstance(shape, Text)]
    assert "two: at most 3 stage activations" in texts and "three: at most 6 stage activations" in texts
    assert to_svg(made).count("<polygon") == 2


def test_every_message_of_a_stage_has_a_mark() -> None:
    n, rounds = 3, 4
    made = message_picture({"cyclic": cyclic(n, rounds)}, title="messages")
    marks = [s for s in made.shapes if isinstance(s, Box) and s.fill == EDGE and s.height > LINE_HEIGHT]
    assert len(marks) == 2 * n * (n - 1) * rounds
