"""The laws of a round: S, N and U run once on every worker that needs them; and lowering keeps all entries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from meshwright.ir.action import COMPUTE, NONE, Action, Entry, Op, actions, walk
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.passes.violation import Law, LawError, Violation

Counts = dict[Op, Counter[tuple[int, int, int]]]
"""How often each op occurs, by (worker, unit, round); syncs of one gradient each are counted once."""


def rounds(schedule: Schedule) -> Iterator[Violation]:
    """S, U and (if sharded) G run once per unit and round on every holder, N once per round; each op on all or none."""
    if schedule.forward_only:
        return
    counts: Counts = defaultdict(Counter)
    syncs: list[dict[Action, int]] = [{} for _ in schedule.lists]
    for worker, entries in enumerate(schedule.lists):
        norm, seen = NONE, set[Entry]()
        for index, entry in enumerate(entries):
            if isinstance(entry, Action) and entry.op not in COMPUTE:
                key = (worker, entry.stage, entry.version)
                counts[entry.op][key] += entry.mb in (NONE, entry.version * schedule.microbatches)
                if counts[entry.op][key] > 1 or entry in seen:
                    yield Violation(Law.ONCE, worker, index, entry, f"{entry} comes twice")
                elif entry.version not in schedule.rounds:
                    start = f", from {schedule.first} on" if schedule.first else ""
                    yield Violation(Law.ONCE, worker, index, entry, f"there are {schedule.steps} rounds{start}")
                elif entry.op is Op.U and entry.version < norm:
                    reason = f"comes after the reduction of round {norm}, which has replaced that of round {entry.version}"
                    yield Violation(Law.ORDER, worker, index, entry, reason)
                norm = entry.version if entry.op is Op.N else norm
                seen.add(entry)
                if entry.op is Op.S:
                    syncs[worker].setdefault(entry, index)
    yield from _units(schedule, counts)
    yield from _single_syncs(schedule, syncs)
    if schedule.sharding is Sharding.PARAMETERS:
        yield from _unread_gathers(schedule)
    if counts[Op.N] and schedule.lowered and not schedule.norm:
        worker = next(iter(counts[Op.N]))[0]
        given = schedule.lists[worker]
        index = next(at for at, entry in enumerate(given) if isinstance(entry, Action) and entry.op is Op.N)
        reason = "the schedule has norm=False, but gradient clipping relies on that flag"
        yield Violation(Law.ONCE, worker, index, given[index], reason)
    if counts[Op.N] or schedule.norm:
        for worker in range(schedule.workers):
            for round_ in schedule.rounds:
                if not counts[Op.N][worker, NONE, round_]:
                    yield _missing(Action(Op.N, NONE, version=round_), worker)


def _units(schedule: Schedule, counts: Counts) -> Iterator[Violation]:
    """If S or U occurs at all, or the schedule is lowered, every unit needs it; in a ring, S only where gradients exist."""
    ends = (Op.S, Op.U, Op.G) if schedule.sharding in (Sharding.STATE, Sharding.GRADIENTS) else (Op.S, Op.U)
    wanted = [op for op in ends if counts[op] or schedule.lowered]
    adds = contributions(schedule) if schedule.ring else set()
    for op in wanted:
        for unit, workers in enumerate(schedule.runners if op is Op.S else schedule.holders):
            if unit >= schedule.stages and not schedule.lowered and all(key[1] != unit for key in counts[op]):
                continue  # a schedule names its stages; lowering adds the tie groups
            for worker in workers:
                for round_ in schedule.rounds:
                    action = Action(op, unit, version=round_)
                    needed = op is not Op.S or not schedule.ring or (worker, unit, round_) in adds
                    if needed and not counts[op][worker, unit, round_]:
                        yield _missing(action, worker)
                    elif not needed and counts[op][worker, unit, round_]:
                        index = schedule.lists[worker].index(action)
                        reason = f"worker {worker} has nothing to add to {action}; a ring contains contributors only"
                        yield Violation(Law.ONCE, worker, index, action, reason)


def _single_syncs(schedule: Schedule, syncs: list[dict[Action, int]]) -> Iterator[Violation]:
    """Where gradients are sharded, every holder has one sync for each gradient of a round; elsewhere one for the round."""
    if not any(syncs):
        return
    single = schedule.sharding.sums_singly
    wanted = gradient_counts(schedule) if single else {}
    for worker, there in enumerate(syncs):
        for entry, index in there.items():
            if (entry.mb != NONE) != single:
                reason = "a sync of sharded gradients names one of them" if single else "only sharded gradients are summed singly"
                yield Violation(Law.ONCE, worker, index, entry, reason)
                return
    for (unit, round_), count in wanted.items():
        for worker in schedule.holders[unit]:
            named = {entry for entry in syncs[worker] if (entry.stage, entry.version) == (unit, round_)}
            needed = {Action(Op.S, unit, round_ * schedule.microbatches + k, version=round_) for k in range(count)}
            for action in sorted(needed ^ named):
                odd = "is missing" if action in needed else "has no gradient"
                yield Violation(Law.ONCE, worker, 0, action, f"{action} {odd} on worker {worker}")


def _unread_gathers(schedule: Schedule) -> Iterator[Violation]:
    """Where parameters are sharded, some action uses every gather, up to the next gather of the unit."""
    for worker, entries in enumerate(schedule.lists):
        unread: dict[int, tuple[int, Action]] = {}
        odd: list[tuple[int, Action]] = []
        for index, entry in enumerate(entries):
            for action in actions(entry):
                if action.op is Op.G:
                    odd += [unread.pop(action.stage)] if action.stage in unread else []
                    unread[action.stage] = index, action
                elif action.op in COMPUTE:
                    for unit in schedule.units_of[action.stage]:
                        unread.pop(unit, None)
        for index, action in (*odd, *unread.values()):
            yield Violation(Law.LEFTOVER, worker, index, action, f"{action} gathers what no action uses")


def gradient_counts(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Returns for each (unit, round) the most gradients that a holder has of it."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for worker, entries in enumerate(schedule.lists):
        for action in walk(entries):
            if action.op is Op.B or action.op is Op.W:
                for unit in schedule.units_of[action.stage]:
                    counts[worker, unit, action.mb // schedule.microbatches] += 1
    found: dict[tuple[int, int], int] = {}
    for (_, unit, round_), count in counts.items():
        found[unit, round_] = max(found.get((unit, round_), 0), count)
    return found


def _missing(action: Action, worker: int) -> Violation:
    return Violation(Law.ONCE, worker, 0, action, f"{action} is missing on worker {worker}")


def refuse_lost(before: Schedule, after: Schedule) -> None:
    """Raises if lowering lost or moved an entry, or left a round incomplete."""
    loses_syncs = after.ring and not before.ring  # a ring has no syncs on workers without gradients
    for worker, (old, new) in enumerate(zip(before.lists, after.lists, strict=True)):
        rest: Iterator[Entry] = iter(new)
        for entry in (entry for entry in old if not (loses_syncs and isinstance(entry, Action) and entry.op is Op.S)):
            if entry not in rest:
                reason = f"{entry} of worker {worker} is lost or out of order when the schedule is lowered"
                raise LawError(before, Violation(Law.ONCE, worker, old.index(entry), entry, reason))
    for violation in rounds(after):
        raise LawError(after, violation)


def only_contributors(schedule: Schedule) -> Schedule:
    """Removes the syncs of workers that have nothing to add, for a schedule that becomes a ring."""
    adds = contributions(schedule)

    def kept(worker: int, entry: Entry) -> bool:
        return not (isinstance(entry, Action) and entry.op is Op.S) or (worker, entry.stage, entry.version) in adds

    lists = tuple(tuple(e for e in entries if kept(w, e)) for w, entries in enumerate(schedule.lists))
    return schedule if lists == schedule.lists else schedule.with_lists(lists)


def contributions(schedule: Schedule) -> set[tuple[int, int, int]]:
    """Returns (worker, unit, round) for every worker that has a gradient to add. Other holders only receive the sum."""
    return {
        (worker, unit, action.mb // schedule.microbatches)
        for worker, entries in enumerate(schedule.lists)
        for action in walk(entries)
        if action.op is Op.B or action.op is Op.W
        for unit in schedule.units_of[action.stage]
    }
