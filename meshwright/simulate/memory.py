"""The memory of every worker over time, from the lifetimes of its values and the times of its entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.ir.action import Kind
from meshwright.ir.analysis.lifetime import BEFORE, Life
from meshwright.ir.timeline import Level

Times = Sequence[tuple[float, float]]
"""(start, end) of every entry of a worker's list."""


def memory(found: Iterable[Life], times: Times) -> tuple[Level, ...]:
    """Returns the levels of bytes and activations of one worker.

    At equal times, entries with a duration end first; all other changes follow the list. An entry without a duration still
    holds its inputs and its outputs at the same time. So peaks follow the list, however short its entries are.
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


def at_peak(found: Iterable[Life], times: Times) -> dict[str, float]:
    """Returns the bytes of one worker at its peak, by the kind of value; "working" is what exists while a backward runs.

    The peak is that of `memory`; the bytes of all kinds add up to it.
    """
    changes: list[tuple[float, bool, int, bool, float, str]] = []
    for life in found:
        if life.bytes:
            kind = "working" if life.value.kind is Kind.SAVED and not life.activations else life.value.kind.value
            changes.append((*_when(times, life.made), True, life.bytes, kind))
            if life.ended is not None:
                changes.append((*_when(times, life.ended), False, -life.bytes, kind))
    changes.sort()
    size = most = 0.0
    count = 0  # changes up to the peak
    for number, change in enumerate(changes, 1):
        size += change[4]
        if size > most:
            most, count = size, number
    peak: dict[str, float] = {}
    for *_, more, kind in changes[:count]:
        peak[kind] = peak.get(kind, 0.0) + more
    return peak


def _when(times: Times, moment: int) -> tuple[float, bool, int]:
    """Returns the time of a moment, and its rank among moments of the same time."""
    if moment == BEFORE:
        return 0.0, False, moment
    start, end = times[moment // 2]
    return (end, end == start, moment) if moment % 2 else (start, True, moment)
