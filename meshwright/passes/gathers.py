"""ZeRO: adds the actions that gather the parameters of divided units. `runtime/parameters/zero_shares.py` runs them.

zero-1, zero-2   after each update: parameters stay whole between steps
zero-3           before each use, one action ahead, so that the gather overlaps with the action before it. An entry that uses
                 the same unit as the entry before it shares its gather. Whole parameters are freed after their last reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.ir.action import COMPUTE, Action, Entry, Op, actions
from meshwright.ir.schedule import Schedule, Sharding


def add_gathers(schedule: Schedule) -> Schedule:
    """Returns the schedule with its gathers."""
    if schedule.sharding is Sharding.NONE:
        return schedule
    if schedule.sharding is Sharding.PARAMETERS:
        return schedule.with_lists(tuple(tuple(_before_uses(schedule, entries)) for entries in schedule.lists))
    return schedule.with_lists(tuple(tuple(_after_updates(entries)) for entries in schedule.lists))


def _after_updates(entries: tuple[Entry, ...]) -> Iterator[Entry]:
    """Yields a list with a gather right after each update: the holders of a unit update it in the same order."""
    for entry in entries:
        yield entry
        if isinstance(entry, Action) and entry.op is Op.U:
            yield entry._replace(op=Op.G)


def _before_uses(schedule: Schedule, entries: tuple[Entry, ...]) -> Iterator[Entry]:
    """Yields a list with gathers before the entry that comes before a use; an update in between is not crossed."""
    counts: Counter[tuple[int, int]] = Counter()
    due: dict[int, list[Action]] = {}
    before, held = 0, frozenset[int]()
    updated: dict[int, int] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, Action) and entry.op is Op.U:
            updated[entry.stage] = index
            continue
        used = {unit: a.version for a in actions(entry) if a.op in COMPUTE for unit in schedule.units_of[a.stage]}
        if not used:
            continue
        for unit, version in used.items():
            stale = updated.get(unit, -1) > before
            if unit not in held or stale:
                number = version * schedule.microbatches + counts[unit, version]
                counts[unit, version] += 1
                due.setdefault(index if stale else before, []).append(Action(Op.G, unit, number, version=version))
        before, held = index, frozenset(used)
    for index, entry in enumerate(entries):
        yield from due.get(index, ())
        yield entry
