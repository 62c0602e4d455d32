"""What every worker holds over time: the lifetimes of its values laid over the clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.ir.lifetime import BEFORE, Life
from meshwright.ir.timeline import Level

Times = Sequence[tuple[float, float]]
"""(start, end) of every entry of a worker's list."""


def memory(found: Iterable[Life], times: Times) -> tuple[Level, ...]:
    """Levels of bytes and activations of one worker. At one time what ends goes first; what takes no time goes by the list."""
    changes: list[tuple[float, bool, int, int, float, float]] = []
    for life in found:
        if life.bytes or life.activations:
            made = _time(times, life.made)
            changes.append((made, True, life.made, 1, life.bytes, life.activations))
            if life.ended is not None:
                ended = _time(times, life.ended)
                changes.append((ended, ended == made, life.ended, 0, -life.bytes, -life.activations))
    changes.sort()
    size = count = 0.0
    levels: list[Level] = []
    for time, *_, more, activations in changes:
        size, count = size + more, count + activations
        levels.append(Level(time, size, round(count, 9)))
    return tuple(levels)


def _time(times: Times, moment: int) -> float:
    return 0.0 if moment == BEFORE else times[moment // 2][moment % 2]
