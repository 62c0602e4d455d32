"""A schedule for evaluation: only the forwards of any schedule.

    0: F0 F1 F2 B0 F3 B1 ..          0: F0 F1 F2 F3 ..
    1: F0 F1 B0 F2 B1 F3 ..    ->    1: F0 F1 F2 F3 ..
    2: F0 B0 F1 B1 F2 B2 ..          2: F0 F1 F2 F3 ..

Placement, replicas, parts and ties do not change, so evaluation runs where training has placed the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.action import Cell, Entry, Op, actions
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, for evaluation.

    Stages stay where they are. Without a flush there is no step to keep: all microbatches of the run become one round.

    Args:
        schedule: The schedule, lowered or not.

    Returns:
        A schedule of forwards alone, not lowered.

    Examples:
        >>> import meshwright as mw
        >>> print(*mw.forward_only(mw.schedules.build("onef1b", workers=2, microbatches=3)).lists[0])
        0F0 0F1 0F2
    """
    closed = schedule.flush and not schedule.prologue and not schedule.drain
    lists = schedule.period if closed else schedule.lists
    start = schedule.first * schedule.microbatches
    channels = (c._replace(producers=tuple(a for a in c.producers if a.op is Op.F)) for c in schedule.channels)
    return replace(
        schedule,
        placement=_counted_from(schedule.placement, start),
        period=tuple(tuple(_forwards(entries, start)) for entries in lists),
        prologue=(),
        drain=(),
        repeats=schedule.repeats if closed else 1,
        microbatches=schedule.microbatches if closed else schedule.microbatches * schedule.steps,
        recompute=None,
        turns=(),
        channels=tuple(channels),
        flush=True,
        ring=False,
        norm=False,
        first=0,
        lowered=False,
    )


def _counted_from(placement: Placement, start: int) -> Placement:
    """Returns the placement in which microbatch m runs where m + `start` runs in the given one."""
    turned = tuple(tuple(teams[start % len(teams) :] + teams[: start % len(teams)] for teams in r) for r in placement.teams)
    return replace(placement, teams=turned)


def _forwards(entries: tuple[Entry, ...], start: int) -> Iterator[Entry]:
    """Yields the forwards of a list, with microbatches counted from `start`; a cell of two forwards stays a cell."""
    for entry in entries:
        found = [action._replace(version=0, mb=action.mb - start) for action in actions(entry) if action.op is Op.F]
        if len(found) == 2:
            yield Cell(*found)
        else:
            yield from found
