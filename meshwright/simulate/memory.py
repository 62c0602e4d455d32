"""What every worker holds over time: the lifetimes of its values laid over the clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.ir.analysis.lifetime import BEFORE, Life
from meshwright.ir.timeline import Level

Times = Sequence[tuple[float, float]]
"""(start, end) of every entry of a worker's list."""


def memory(found: Iterable[Life], times: Times) -> tuple[Level, ...]:
    """Levels of bytes and activations of one worker.

    At one time the entries that took time end first, then all else goes by the list: an entry that takes no time has its
    inputs and its outputs at once, like any other. So peaks are those of the list, however little its entries take.
    """
    changes: list[tuple[float, bool, int, bool, float, float]] = []
    for life in found:
        if life.bytes or life.activations:
            changes.append((*_when(times, life.made), True, life.bytes, life.activations))
            if life.ended is not None:
                changes.append((*_when(times, life.ended), False, -life.bytes, -life.activations))
    changes.sort()
    size = count = 0.0
    levels: list[Level] = []
    for time, *_, more, activations in changes:
        size, count = size + more, count + activations
        levels.append(Level(time, size, round(count, 9)))
    return tuple(levels)


def _when(times: Times, moment: int) -> tuple[float, bool, int]:
    """The time of a moment, and its place among those of the same time."""
    if moment == BEFORE:
        return 0.0, False, moment
    start, end = times[moment // 2]
    return (end, end == start, moment) if moment % 2 else (start, True, moment)
