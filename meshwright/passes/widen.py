"""Width: the workers of a team split the rows of their stage's microbatches, and all run the list of the original worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Lists, Schedule


def widen(schedule: Schedule, width: Sequence[int]) -> Schedule:
    """Gives stage s `width[s]` workers, numbered stage by stage. Needs one worker per stage and no half microbatches."""
    plain = schedule.placement == Placement.line(schedule.workers)
    if not plain or schedule.parts > 1 or schedule.channels or schedule.lowered:
        raise MeshwrightError(
            f"{schedule.name} cannot be widened: width needs one worker per stage, whole microbatches and unlowered lists",
            fix="onef1b, gpipe, zero_bubble or shifted",
        )
    if len(width) != schedule.stages:
        raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, but width has {len(width)}")
    for stage, count in enumerate(width):
        if type(count) is not int or count < 1:
            raise MeshwrightError(
                f"stage {stage} of {schedule.name} needs a whole number of workers, at least one, got {count!r}", fix="width 1"
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
