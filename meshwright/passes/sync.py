"""Adds gradient syncs and updates that a schedule has not placed itself.

lazy       every sync after all compute of the step
eager      a unit's sync as soon as the last of its holders has its last gradient
eager-opt  eager only if each holder still has a bubble to hide it in (Chimera with one pair and whole backwards:
           exactly the stages above D/2; with more pairs or split backwards other stages, or none)
ring       no collective: running sums go from worker to worker in microbatch order, then the total goes back around
           (with a flush at the end of the step; without one as soon as gradients exist)

All holders of a unit get its sync at one point of a linear order of the schedule, so all workers issue collectives in the
same order. A schedule with a flush then runs one global reduction (N) before its updates; one without a flush has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from meshwright.ir.action import NONE, Action, Entry, Op, walk
from meshwright.ir.analysis.order import Flow, Place, Sweep, sweep
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.passes.gathers import add_gathers
from meshwright.passes.messages import Duration, stuck_error
from meshwright.passes.round_laws import only_contributors
from meshwright.passes.tie_updates import synced, tie_updates

Issue = tuple[Action, tuple[int, ...]]
"""A sync and the workers that issue it."""


class Sync(StrEnum):
    """When gradients are summed."""

    LAZY = "lazy"
    EAGER = "eager"
    EAGER_OPT = "eager-opt"
    RING = "ring"


def sync(schedule: Schedule, policy: Sync = Sync.EAGER, *, duration: Duration | None = None) -> Schedule:
    """Adds the syncs, the reduction and the updates that a schedule lacks. Keeps those that it has placed."""
    placed = {action.op for entries in schedule.lists for action in walk(entries)}
    if schedule.sharding is Sharding.PARAMETERS and Op.G not in placed:
        schedule = add_gathers(schedule)  # nothing is whole before
    if schedule.forward_only:
        return schedule
    if policy is Sync.RING and not schedule.ring and Op.S in placed:
        schedule = only_contributors(schedule)
    schedule = replace(schedule, ring=schedule.ring or policy is Sync.RING)
    if Op.U in placed and schedule.ties and not schedule.flush:
        schedule = tie_updates(schedule)
    shared = any(len(workers) > 1 for workers in schedule.holders) and not schedule.ring
    if Op.S not in placed and Op.U in placed and shared and not schedule.flush:
        schedule = schedule.with_lists(tuple(tuple(synced(entries)) for entries in schedule.lists))
    elif Op.S not in placed:
        bare, ends = _without_ends(schedule)
        schedule = _with_syncs(bare, policy, duration)
        if ends:
            schedule = schedule.with_lists(tuple((*a, *b) for a, b in zip(schedule.lists, ends, strict=True)))
    norm = Op.U not in placed and Op.N not in placed and schedule.flush
    if Op.U not in placed:
        whole = tuple((*entries, *_end(schedule, w, norm)) for w, entries in enumerate(schedule.lists))
        schedule = schedule.with_lists(whole)
    if schedule.sharding is not Sharding.PARAMETERS and Op.G not in placed:
        schedule = add_gathers(schedule)
    return replace(schedule, norm=schedule.norm or norm or Op.N in placed)


def _with_syncs(schedule: Schedule, policy: Sync, duration: Duration | None) -> Schedule:
    """Places each unit's sync after its last gradient, or at the end, on all its holders at the same point."""
    shared = not schedule.ring and any(len(workers) > 1 for workers in schedule.holders)
    order = None
    if shared and (policy is not Sync.LAZY or schedule.sharding.sums_singly):
        flow = Flow.of(schedule)
        order = sweep(flow, duration=duration)
        if order.stuck:
            raise stuck_error(schedule, flow, order)
    sequence: Iterable[Place] = order.sequence if order else _list_after_list(schedule)
    places = list(sequence)
    lists: list[list[Entry]] = [[] for _ in schedule.lists]
    at_end: list[Issue] = []
    due = _due(schedule, places, order, policy, at_end)
    for position, (worker, index) in enumerate(places):
        lists[worker].append(schedule.lists[worker][index])
        for action, workers in due.get(position, ()):
            for member in workers:
                lists[member].append(action)
    for action, workers in at_end:
        for member in workers:
            lists[member].append(action)
    return schedule.with_lists(tuple(map(tuple, lists)))


def _without_ends(schedule: Schedule) -> tuple[Schedule, list[tuple[Entry, ...]]]:
    """Splits off the reductions and updates at the end of the lists. Returns the schedule without them, and the ends."""
    if not schedule.flush:
        return schedule, []
    ends = []
    for entries in schedule.lists:
        count = len(entries)
        while count and isinstance(last := entries[count - 1], Action) and last.op in (Op.N, Op.U):
            count -= 1
        ends.append(entries[count:])
    if not any(ends):
        return schedule, []
    return schedule.with_lists(tuple(e[: len(e) - len(end)] for e, end in zip(schedule.lists, ends, strict=True))), ends


def _due(
    schedule: Schedule, places: list[Place], order: Sweep | None, policy: Sync, at_end: list[Issue]
) -> dict[int, list[Issue]]:
    """Returns the syncs to place after each position of the linear order; syncs that have to wait go to `at_end`."""
    if schedule.sharding.sums_singly:
        return _due_singly(schedule, places)
    last: dict[tuple[int, int, int], int] = {}
    for position, (worker, index) in enumerate(places):
        for action in walk((schedule.lists[worker][index],)):
            if action.op is Op.B or action.op is Op.W:
                for unit in schedule.units_of[action.stage]:
                    last[unit, action.mb // schedule.microbatches, worker] = position
    due: dict[int, list[Issue]] = defaultdict(list)
    for unit, round_ in sorted({(unit, round_) for unit, round_, _ in last}, key=lambda key: (key[1], -key[0])):
        action = Action(Op.S, unit, version=round_)
        ready = {w: last[unit, round_, w] for w in schedule.runners[unit] if (unit, round_, w) in last}
        members = tuple(ready) if schedule.ring else schedule.holders[unit]
        if schedule.flush and (policy is Sync.LAZY or schedule.ring):
            at_end.append((action, members))
        elif schedule.ring or len(members) == 1:
            for worker, position in ready.items():
                due[position].append((action, (worker,)))
        else:
            moment = max(ready.values())
            if policy is Sync.EAGER_OPT and not _hides(order, places[moment], members):
                at_end.append((action, members))
            else:
                due[moment].append((action, members))
    return due


def _due_singly(schedule: Schedule, places: list[Place]) -> dict[int, list[Issue]]:
    """One sync for each gradient, as soon as all holders have it: the k-th gradients of the holders are summed together."""
    made: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, (worker, index) in enumerate(places):
        for action in walk((schedule.lists[worker][index],)):
            if action.op is Op.B or action.op is Op.W:
                for unit in schedule.units_of[action.stage]:
                    made[unit, action.mb // schedule.microbatches][worker].append(position)
    due: dict[int, list[Issue]] = defaultdict(list)
    for (unit, round_), positions in sorted(made.items(), key=lambda item: (item[0][1], -item[0][0])):
        for k in range(max(map(len, positions.values()))):
            moment = max(of_worker[k] for of_worker in positions.values() if k < len(of_worker))
            action = Action(Op.S, unit, round_ * schedule.microbatches + k, version=round_)
            due[moment].append((action, schedule.holders[unit]))
    return due


def _hides(order: Sweep | None, ready: Place, members: Iterable[int]) -> bool:
    """True if every member still has a bubble after the last gradient of the unit."""
    return order is not None and all(_bubble_after(order, w, order.end[ready[0]][ready[1]]) for w in members)


def _bubble_after(order: Sweep, worker: int, time: float) -> bool:
    """True if a worker is idle at some time after `time` and before its end."""
    starts, ends = order.start[worker], order.end[worker]
    free = time
    for start, end in zip(starts, ends, strict=True):
        if end <= time:
            continue
        if start > free + 1e-9:
            return True
        free = max(free, end)
    return False


def _end(schedule: Schedule, worker: int, norm: bool) -> list[Action]:
    """Returns the reduction and the updates of every round."""
    units = [unit for unit in reversed(range(schedule.units)) if worker in schedule.holders[unit]]
    found: list[Action] = []
    for round_ in schedule.rounds:
        found += [Action(Op.N, NONE, version=round_)] if norm else []
        found += [Action(Op.U, unit, version=round_) for unit in units]
    return found


def _list_after_list(schedule: Schedule) -> Iterable[Place]:
    return ((worker, index) for worker, entries in enumerate(schedule.lists) for index in range(len(entries)))
