"""What every worker holds over time: the lifetimes of its values laid over the clock."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.lifetime import BEFORE, lives
from meshwright.ir.order import Flow
from meshwright.ir.price import Price
from meshwright.ir.timeline import Level

Times = Sequence[tuple[float, float]]
"""(start, end) of every entry of a worker's list."""


def memory(flow: Flow, price: Price, worker: int, times: Times) -> tuple[Level, ...]:
    """Levels of bytes and activations of one worker; at one moment of its list what ends goes first."""
    changes: list[tuple[float, int, int, float, float]] = []
    for life in lives(flow, price, worker):
        if life.bytes or life.activations:
            changes.append((_time(times, life.made), life.made, 1, life.bytes, life.activations))
            if life.ended is not None:
                changes.append((_time(times, life.ended), life.ended, 0, -life.bytes, -life.activations))
    changes.sort()
    size = count = 0.0
    levels: list[Level] = []
    for time, _, _, more, activations in changes:
        size, count = size + more, count + activations
        levels.append(Level(time, size, round(count, 9)))
    return tuple(levels)


def _time(times: Times, moment: int) -> float:
    return 0.0 if moment == BEFORE else times[moment // 2][moment % 2]
