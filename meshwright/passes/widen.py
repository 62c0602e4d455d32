"""Width: the workers of a team split the rows of their stage's microbatches, and all run the list of the original worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import ChannelOrder, Lists, Schedule


def widen(schedule: Schedule, width: Sequence[int]) -> Schedule:
    """Gives stage s `width[s]` workers, numbered stage by stage. Needs one worker per stage and no half microbatches.

    If the schedule orders the messages between two stages, all workers that exchange rows there send them in that order.
    """
    plain = schedule.placement == Placement.line(schedule.workers)
    if not plain or schedule.parts > 1 or schedule.lowered:
        raise MeshwrightError(
            f"{schedule.name} cannot be widened: width needs one worker per stage, whole microbatches and unlowered lists",
            fix="onef1b, gpipe, zero_bubble, listed or shifted",
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

    placement = Placement((teams,))
    return replace(
        schedule,
        placement=placement,
        prologue=spread(schedule.prologue),
        period=spread(schedule.period),
        drain=spread(schedule.drain),
        channels=tuple(each for channel in schedule.channels for each in _between_teams(channel, placement)),
    )


def _between_teams(channel: ChannelOrder, placement: Placement) -> Iterator[ChannelOrder]:
    """Yields the channel of every pair of workers that exchanges rows between the two stages of a channel."""
    first, last = sorted(channel.workers)
    if not (first >= 0 and last == first + 1 < placement.stages):
        raise MeshwrightError(f"the channel {channel.workers} does not join two stages in a row of {placement.stages}")
    before, after = (placement.teams[0][stage][0] for stage in (first, last))
    for _, source, target in placement.pieces(before, after):
        yield ChannelOrder((source, target), channel.producers)
