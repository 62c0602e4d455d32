"""Which ranks add up a unit's gradients together, over all data-parallel copies of a schedule's workers.

Rank w + workers * j is worker w of copy j. With collectives all holders of a unit in all copies are one group. A ring adds
up inside a copy by messages; the worker that completes the sum then adds it to those of its siblings in the other copies.
"""

from __future__ import annotations

from meshwright.ir.analysis.effects import rings
from meshwright.ir.schedule import Schedule

Ranks = tuple[int, ...]
Groups = tuple[tuple[Ranks, ...], ...]
"""For each unit its groups; a rank is in at most one of them."""


def siblings(schedule: Schedule, copies: int, worker: int) -> Ranks:
    """The ranks that are this worker in their copies."""
    return tuple(worker + schedule.workers * j for j in range(copies))


def holders(schedule: Schedule, copies: int, unit: int) -> Ranks:
    """Every rank that holds a unit's parameters, over all copies."""
    return tuple(w + schedule.workers * j for j in range(copies) for w in schedule.holders[unit])


def groups(schedule: Schedule, copies: int) -> Groups:
    """The groups that add up each unit; all ranks make them alike."""
    if not schedule.ring:
        return tuple((holders(schedule, copies, unit),) for unit in range(schedule.units))
    closing: list[dict[int, None]] = [{} for _ in range(schedule.units)]
    for (unit, _), ring in sorted(rings(schedule).items()):
        closing[unit][ring[-1]] = None
    return tuple(tuple(siblings(schedule, copies, worker) for worker in sorted(last)) for last in closing)
