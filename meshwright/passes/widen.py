"""Width: the workers of a team share the rows of their stage's microbatches, and all run the list that one worker had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Lists, Schedule


def widen(schedule: Schedule, width: Sequence[int]) -> Schedule:
    """Give stage s `width[s]` workers, numbered stage after stage; it takes one worker per stage and no halves."""
    plain = schedule.placement == Placement.line(schedule.workers)
    if not plain or schedule.parts > 1 or schedule.channels or schedule.lowered:
        raise MeshwrightError(
            f"{schedule.name} cannot be widened: width is for one worker per stage, whole microbatches and lists not yet lowered",
            fix="onef1b, gpipe, zero_bubble or shifted",
        )
    if len(width) != schedule.stages:
        raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, width names {len(width)}")
    for stage, count in enumerate(width):
        if type(count) is not int or count < 1:
            raise MeshwrightError(
                f"stage {stage} of {schedule.name} needs a whole number of at least one worker, got {count!r}", fix="width 1"
            )
    ends = [0, *accumulate(width)]
    teams = tuple((tuple(range(first, last)),) for first, last in pairwise(ends))

    def spread(lists: Lists) -> Lists:
        return tuple(entries for entries, count in zip(lists, width, strict=bool(lists)) for _ in range(count))

    return replace(
        schedule,
        placement=Placement((teams,)),
        prologue=spread(schedule.prologue),
        period=spread(schedule.period),
        drain=spread(schedule.drain),
    )
