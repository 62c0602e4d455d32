"""Which seats sum a unit's gradients together, over all data-parallel copies of the pipeline.

Seat w + workers * j is worker w of copy j: one rank, or the ranks of a tensor-parallel box. With collectives, all holders of a
unit in all copies form one group. A ring sums inside a copy with messages; the worker that completes the sum then adds it to the
sums of its siblings in the other copies.
"""

from __future__ import annotations

from meshwright.ir.analysis.effects import rings
from meshwright.ir.schedule import Schedule

Seats = tuple[int, ...]
Groups = tuple[tuple[Seats, ...], ...]
"""The groups of each unit; a seat is in at most one of them."""


def siblings(schedule: Schedule, copies: int, worker: int) -> Seats:
    """Returns the seats that have this worker index in their data-parallel copy."""
    return tuple(worker + schedule.workers * j for j in range(copies))


def holders(schedule: Schedule, copies: int, unit: int) -> Seats:
    """Returns every seat that holds a unit's parameters, over all data-parallel copies."""
    return tuple(w + schedule.workers * j for j in range(copies) for w in schedule.holders[unit])


def groups(schedule: Schedule, copies: int) -> Groups:
    """Returns the groups that sum each unit. All ranks compute the same groups."""
    if not schedule.ring:
        return tuple((holders(schedule, copies, unit),) for unit in range(schedule.units))
    closing: list[dict[int, None]] = [{} for _ in range(schedule.units)]
    for (unit, _), ring in sorted(rings(schedule).items()):
        closing[unit][ring[-1]] = None
    return tuple(tuple(siblings(schedule, copies, worker) for worker in sorted(last)) for last in closing)
