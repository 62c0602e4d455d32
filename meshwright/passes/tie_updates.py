"""Updates of tie groups, for a schedule without a flush that has placed only the updates of its stages.

A tie group follows its first stage: its forwards read the version that the first stage reads, and its update is placed right
after the update of the first stage. The backward of the first stage is the last of a round, so all gradients of the group
exist by then. Holders without the first stage get the update at the same point of the linear order. In a ring, where nothing
is issued together, they get it right before the first forward that reads the new version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.action import Action, Entry, Op, walk
from meshwright.ir.analysis.order import Flow, Place, sweep
from meshwright.ir.schedule import Schedule
from meshwright.passes.messages import stuck_error


def tie_updates(schedule: Schedule) -> Schedule:
    """Adds the missing updates of tie groups."""
    placed = {action.stage for entries in schedule.lists for action in walk(entries) if action.op is Op.U}
    missing = [unit for unit in range(schedule.stages, schedule.units) if unit not in placed]
    if not missing:
        return schedule
    same_holders = all(set(schedule.holders[unit]) == set(schedule.holders[schedule.stages_of(unit)[0]]) for unit in missing)
    if schedule.ring and not same_holders:
        return schedule.with_lists(tuple(tuple(_updated_before_use(schedule, w, missing)) for w in range(schedule.workers)))
    lists: list[list[Entry]] = [[] for _ in schedule.lists]
    for worker, entry in _list_after_list(schedule) if same_holders else _in_order(schedule):
        lists[worker].append(entry)
        if isinstance(entry, Action) and entry.op is Op.U:
            for unit in missing:
                for member in _members(schedule, unit, entry.stage, worker):
                    lists[member].append(Action(Op.U, unit, version=entry.version))
    return schedule.with_lists(tuple(map(tuple, lists)))


def _updated_before_use(schedule: Schedule, worker: int, missing: list[int]) -> Iterator[Entry]:
    """Yields a worker's list with the updates of tie groups: after those of their first stage, else before their first use."""
    forwards = [a for entries in schedule.lists for a in walk(entries) if a.op is Op.F]
    read = {(action.stage, action.replica, action.mb): action.version for action in forwards}
    stages = {stage for _, stage in schedule.placement.held[worker]}
    follows = {unit: schedule.stages_of(unit)[0] for unit in missing if stages & set(schedule.stages_of(unit))}
    newest = dict.fromkeys(follows, schedule.first)

    def updates(unit: int, wanted: int) -> Iterator[Action]:
        yield from (Action(Op.U, unit, version=k) for k in range(newest[unit], wanted))
        newest[unit] = max(wanted, newest[unit])

    for entry in schedule.lists[worker]:
        for action in walk((entry,)):
            if action.op is Op.F:
                for unit in schedule.units_of[action.stage]:
                    if unit in follows and follows[unit] not in stages:
                        yield from updates(unit, read[follows[unit], action.replica, action.mb])
        yield entry
        if isinstance(entry, Action) and entry.op is Op.U:
            for unit in [unit for unit, first in follows.items() if first == entry.stage]:
                yield from updates(unit, entry.version + 1)
    for unit in follows:
        yield from updates(unit, schedule.rounds.stop)


def synced(entries: tuple[Entry, ...]) -> Iterator[Entry]:
    """Yields a list with placed updates, with a sync right before each update."""
    for entry in entries:
        if isinstance(entry, Action) and entry.op is Op.U:
            yield entry._replace(op=Op.S)
        yield entry


def _members(schedule: Schedule, unit: int, updated: int, worker: int) -> list[int]:
    """Returns who updates a tie group when `worker` updates its first stage: that worker, plus (once) holders without it."""
    first = schedule.stages_of(unit)[0]
    if first != updated:
        return []
    having = schedule.holders[first]
    others = [w for w in schedule.holders[unit] if w not in having]
    return [worker, *others] if worker == having[0] else [worker]


def _list_after_list(schedule: Schedule) -> Iterator[tuple[int, Entry]]:
    return ((worker, entry) for worker, entries in enumerate(schedule.lists) for entry in entries)


def _in_order(schedule: Schedule) -> Iterator[tuple[int, Entry]]:
    """Yields all entries in the linear order of the schedule without its ties, with a sync before each update.

    Entries of tie groups that the schedule has placed itself come right after the entry before them.
    """
    has_syncs = any(action.op is Op.S for entries in schedule.lists for action in walk(entries))
    own: list[list[Entry]] = [[] for _ in schedule.lists]
    ties_at: dict[Place, list[Entry]] = {}
    for worker, entries in enumerate(schedule.lists):
        for entry in entries:
            if isinstance(entry, Action) and entry.stage >= schedule.stages:
                ties_at.setdefault((worker, len(own[worker])), []).append(entry)
            else:
                own[worker] += (entry,) if has_syncs else synced((entry,))
    work = replace(schedule, ties=(), ring=False).with_lists(tuple(map(tuple, own)))
    flow = Flow.of(work)
    order = sweep(flow)
    if order.stuck:
        raise stuck_error(work, flow, order)
    yield from ((worker, entry) for (worker, index), found in ties_at.items() if index == 0 for entry in found)
    for worker, index in order.sequence:
        entry = work.lists[worker][index]
        if has_syncs or not isinstance(entry, Action) or entry.op is not Op.S:
            yield worker, entry
        yield from ((worker, entry) for entry in ties_at.get((worker, index + 1), ()))
