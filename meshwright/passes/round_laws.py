"""The laws of a round: S, N and U once on all who need them, and what lowering may do to a schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from meshwright.ir.action import COMPUTE, NONE, Action, Entry, Op, walk
from meshwright.ir.schedule import Schedule
from meshwright.passes.violation import Law, LawError, Violation

Counts = dict[Op, Counter[tuple[int, int, int]]]
"""How often each op comes, by (worker, unit, round)."""


def rounds(schedule: Schedule) -> Iterator[Violation]:
    """S and U once per unit and round on every holder, N once per round on every worker; all or none of each."""
    if schedule.forward_only:
        return
    counts: Counts = defaultdict(Counter)
    for worker, entries in enumerate(schedule.lists):
        norm = NONE
        for index, entry in enumerate(entries):
            if isinstance(entry, Action) and entry.op not in COMPUTE:
                key = (worker, entry.stage, entry.version)
                counts[entry.op][key] += 1
                if counts[entry.op][key] > 1:
                    yield Violation(Law.ONCE, worker, index, entry, f"{entry} comes twice")
                elif entry.version >= schedule.steps:
                    yield Violation(Law.ONCE, worker, index, entry, f"there are {schedule.steps} rounds")
                elif entry.op is Op.U and entry.version < norm:
                    reason = f"comes after the reduction of round {norm}, which has taken the place of that of {entry.version}"
                    yield Violation(Law.ORDER, worker, index, entry, reason)
                norm = entry.version if entry.op is Op.N else norm
    yield from _units(schedule, counts)
    if counts[Op.N] and schedule.lowered and not schedule.norm:
        worker = next(iter(counts[Op.N]))[0]
        given = schedule.lists[worker]
        index = next(at for at, entry in enumerate(given) if isinstance(entry, Action) and entry.op is Op.N)
        reason = "the schedule has norm=False, and what clips by the norm of all gradients asks for that"
        yield Violation(Law.ONCE, worker, index, given[index], reason)
    if counts[Op.N] or schedule.norm:
        for worker in range(schedule.workers):
            for round_ in range(schedule.steps):
                if not counts[Op.N][worker, NONE, round_]:
                    yield _missing(Action(Op.N, NONE, version=round_), worker)


def _units(schedule: Schedule, counts: Counts) -> Iterator[Violation]:
    """S and U of every unit, where there are any or all must be there; in a ring S where there is something to add."""
    wanted = [op for op in (Op.S, Op.U) if counts[op] or schedule.lowered]
    adds = contributions(schedule) if schedule.ring else set()
    for op in wanted:
        for unit, workers in enumerate(schedule.holders):
            if unit >= schedule.stages and not schedule.lowered and all(key[1] != unit for key in counts[op]):
                continue  # a schedule knows its stages; lowering adds what tie groups need
            for worker in workers:
                for round_ in range(schedule.steps):
                    action = Action(op, unit, version=round_)
                    needed = op is Op.U or not schedule.ring or (worker, unit, round_) in adds
                    if needed and not counts[op][worker, unit, round_]:
                        yield _missing(action, worker)
                    elif not needed and counts[op][worker, unit, round_]:
                        index = schedule.lists[worker].index(action)
                        reason = f"worker {worker} has nothing to add to {action}, and a ring goes through those alone that have"
                        yield Violation(Law.ONCE, worker, index, action, reason)


def _missing(action: Action, worker: int) -> Violation:
    return Violation(Law.ONCE, worker, 0, action, f"{action} is missing on worker {worker}")


def refuse_lost(before: Schedule, after: Schedule) -> None:
    """Raise where lowering has lost or moved an entry, or left a round incomplete: the laws hold for what runs."""
    loses_syncs = after.ring and not before.ring  # those of workers that have nothing to add
    for worker, (old, new) in enumerate(zip(before.lists, after.lists, strict=True)):
        rest: Iterator[Entry] = iter(new)
        for entry in (entry for entry in old if not (loses_syncs and isinstance(entry, Action) and entry.op is Op.S)):
            if entry not in rest:
                reason = f"{entry} of worker {worker} is lost or out of order when the schedule is lowered"
                raise LawError(before, Violation(Law.ONCE, worker, old.index(entry), entry, reason))
    for violation in rounds(after):
        raise LawError(after, violation)


def only_contributors(schedule: Schedule) -> Schedule:
    """A schedule that becomes a ring: without the syncs of workers that have nothing to add."""
    adds = contributions(schedule)

    def kept(worker: int, entry: Entry) -> bool:
        return not (isinstance(entry, Action) and entry.op is Op.S) or (worker, entry.stage, entry.version) in adds

    lists = tuple(tuple(e for e in entries if kept(w, e)) for w, entries in enumerate(schedule.lists))
    return schedule if lists == schedule.lists else schedule.with_lists(lists)


def contributions(schedule: Schedule) -> set[tuple[int, int, int]]:
    """(worker, unit, round) where a worker has a gradient to add to a ring; the others of the unit only get the sum."""
    return {
        (worker, unit, action.mb // schedule.microbatches)
        for worker, entries in enumerate(schedule.lists)
        for action in walk(entries)
        if action.op is Op.B or action.op is Op.W
        for unit in schedule.units_of[action.stage]
    }
