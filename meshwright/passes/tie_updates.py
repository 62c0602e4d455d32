"""Updates of tie groups, where a schedule without a flush has placed those of its stages only.

A tie group goes with its first stage: its forwards read the version that the first stage reads, and its update stands
right behind the first stage's. Its backward comes last in a round, so every gradient of the group is there by then.
Holders that do not have the first stage get the update at the same point of the linear order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.action import Action, Entry, Op, walk
from meshwright.ir.analysis.order import Flow, Place, sweep
from meshwright.ir.schedule import Schedule
from meshwright.passes.messages import stuck_error


def tie_updates(schedule: Schedule) -> Schedule:
    """Add the updates of tie groups that are missing."""
    placed = {action.stage for entries in schedule.lists for action in walk(entries) if action.op is Op.U}
    missing = [unit for unit in range(schedule.stages, schedule.units) if unit not in placed]
    if not missing:
        return schedule
    alone = all(set(schedule.holders[unit]) == set(schedule.holders[schedule.stages_of(unit)[0]]) for unit in missing)
    lists: list[list[Entry]] = [[] for _ in schedule.lists]
    for worker, entry in _list_after_list(schedule) if alone else _in_order(schedule):
        lists[worker].append(entry)
        if isinstance(entry, Action) and entry.op is Op.U:
            for unit in missing:
                for member in _members(schedule, unit, entry.stage, worker):
                    lists[member].append(Action(Op.U, unit, version=entry.version))
    return schedule.with_lists(tuple(map(tuple, lists)))


def synced(entries: tuple[Entry, ...]) -> Iterator[Entry]:
    """A list without a flush that has placed its updates: each sync right before its update."""
    for entry in entries:
        if isinstance(entry, Action) and entry.op is Op.U:
            yield entry._replace(op=Op.S)
        yield entry


def _members(schedule: Schedule, unit: int, updated: int, worker: int) -> list[int]:
    """Who updates a tie group when `worker` updates one of its stages: itself, and with its first worker those without it."""
    first = schedule.stages_of(unit)[0]
    if first != updated:
        return []
    having = schedule.holders[first]
    others = [w for w in schedule.holders[unit] if w not in having]
    return [worker, *others] if worker == having[0] else [worker]


def _list_after_list(schedule: Schedule) -> Iterator[tuple[int, Entry]]:
    return ((worker, entry) for worker, entries in enumerate(schedule.lists) for entry in entries)


def _in_order(schedule: Schedule) -> Iterator[tuple[int, Entry]]:
    """Everything in the linear order that the schedule has without its ties, each update with a sync before it.

    What it has placed of tie groups itself goes with the entry before it.
    """
    has_syncs = any(action.op is Op.S for entries in schedule.lists for action in walk(entries))
    own: list[list[Entry]] = [[] for _ in schedule.lists]
    behind: dict[Place, list[Entry]] = {}
    for worker, entries in enumerate(schedule.lists):
        for entry in entries:
            if isinstance(entry, Action) and entry.stage >= schedule.stages:
                behind.setdefault((worker, len(own[worker])), []).append(entry)
            else:
                own[worker] += (entry,) if has_syncs else synced((entry,))
    work = replace(schedule, ties=(), ring=False).with_lists(tuple(map(tuple, own)))
    flow = Flow.of(work)
    order = sweep(flow)
    if order.stuck:
        raise stuck_error(work, flow, order)
    yield from ((worker, entry) for (worker, index), found in behind.items() if index == 0 for entry in found)
    for worker, index in order.sequence:
        entry = work.lists[worker][index]
        if has_syncs or not isinstance(entry, Action) or entry.op is not Op.S:
            yield worker, entry
        yield from ((worker, entry) for entry in behind.get((worker, index + 1), ()))
