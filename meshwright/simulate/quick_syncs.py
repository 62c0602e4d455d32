"""Where sums of gradients, the norm, updates and gathers stand in the lists of the quick sweep, as `passes/sync.py` places them.

A sum stands after the last gradient that it adds up, in the linear order of all lists. If several workers of a pipeline share a
stage, that order depends on times; else it follows from the lists alone, and is found once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.ir.schedule import Schedule, Sharding
from meshwright.passes.sync import Sync
from meshwright.simulate.quick_program import Ints, QuickLists

COMPUTES, REDUCES, NORM, UPDATES = range(4)


@dataclass(frozen=True)
class PlacedRows:
    """Entries of all lists, one after the other, with sums, norm, updates and gathers. Events are what workers do together."""

    first: Ints
    classes: Ints  # -1 for a reduction, norm, update or gather
    reads: Ints
    writes: Ints
    event: Ints  # -1 for none
    kind: Ints
    members: list[tuple[int, ...]]
    sums: list[int]
    """The units that the first events add up."""
    gathers: dict[int, int]
    """The unit that an event gathers."""


def follows_times(schedule: Schedule, sync: Sync) -> bool:
    """Whether the places of sums depend on times."""
    shared = any(len(workers) > 1 for workers in schedule.holders)
    return shared and (sync is not Sync.LAZY or schedule.sharding.sums_singly)


def list_positions(lists: QuickLists) -> list[Ints]:
    """The positions of each list's entries in a linear order: list after list."""
    first = lists.joined[0]
    return [np.arange(first[worker], first[worker + 1]) for worker in range(len(first) - 1)]


def placed_rows(lists: QuickLists, schedule: Schedule, sync: Sync, positions: Sequence[Ints]) -> PlacedRows:
    """Adds sums, the norm, updates and gathers to the lists, whose entries have these positions in a linear order."""
    units = list(reversed(range(schedule.units)))
    moments = _moments(lists, schedule, sync, positions)
    members = [*(schedule.holders[unit] for _, unit in moments), tuple(range(schedule.workers))]
    norm = len(moments)
    gathers: dict[int, int] = {}
    if schedule.sharding is not Sharding.NONE:
        gathers = {unit: len(members) + k for k, unit in enumerate(units)}
        members += [schedule.holders[unit] for unit in units]
    sums: list[list[tuple[int, int]]] = [[] for _ in lists.classes]  # of each list: place, event
    for event, (moment, _) in enumerate(moments):
        for member in members[event]:
            sums[member].append((int(np.searchsorted(positions[member], moment, side="right")), event))
    first, classes, reads, writes = lists.joined
    added: list[tuple[int, int, int]] = []  # place in all lists, event, kind
    begins = [0]
    for worker in range(schedule.workers):
        start, end = int(first[worker]), int(first[worker + 1])
        added += [(start + place, event, REDUCES) for place, event in sums[worker]]
        added.append((end, norm, NORM))
        for unit in units:
            if worker in schedule.holders[unit]:
                added += [(end, -1, UPDATES), *([(end, gathers[unit], REDUCES)] if gathers else [])]
        begins.append(end + len(added))
    places, numbers, kinds = (np.array(column, np.int64) for column in zip(*added, strict=True))
    none = np.full(len(classes), -1, np.int64)
    return PlacedRows(
        np.array(begins, np.int64),
        np.insert(classes, places, -1),
        np.insert(reads, places, -1, axis=0),
        np.insert(writes, places, -1, axis=0),
        np.insert(none, places, numbers),
        np.insert(np.full(len(none), COMPUTES, np.int64), places, kinds),
        members,
        [unit for _, unit in moments],
        {event: unit for unit, event in gathers.items()},
    )


def _moments(lists: QuickLists, schedule: Schedule, sync: Sync, positions: Sequence[Ints]) -> list[tuple[int, int]]:
    """The sums of a step in their order: after which position, and of which unit."""
    found: list[tuple[int, int, int]] = []  # moment, rank among those of one moment, unit
    late = sum(map(len, lists.classes))
    for unit in reversed(range(schedule.units)):
        ready = {w: lists.last_gradients[w][unit] for w in schedule.runners[unit] if unit in lists.last_gradients[w]}
        if not ready:
            continue
        if schedule.sharding.sums_singly:
            for k in range(max(map(len, ready.values()))):
                moment = max(int(positions[w][of[k]]) for w, of in ready.items() if k < len(of))
                found.append((moment, len(found), unit))
        else:
            moment = late if sync is Sync.LAZY else max(int(positions[w][of[-1]]) for w, of in ready.items())
            found.append((moment, len(found), unit))
    return [(moment, unit) for moment, _, unit in sorted(found)]
