"""The laws that need only counting: which worker runs what, how often, where, and in which order in its own list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.ir.action import COMPUTE, NONE, Action, Cell, Entry, Op, Transfer, Value, actions, walk
from meshwright.ir.analysis.effects import ACTIVATIONS, rule
from meshwright.ir.placement import Rows
from meshwright.ir.schedule import Lists, Schedule, Sharding
from meshwright.passes.round_laws import rounds
from meshwright.passes.violation import Law, Violation, broken
from meshwright.passes.wellformed import faults

__all__ = ["Law", "Violation", "border", "broken", "refuse_broken", "structure"]


PLAIN = frozenset({("", Op.F), ("F", Op.B), ("F", Op.I), ("FI", Op.W)})
EARLY = frozenset({("", Op.F), ("F", Op.R), ("FR", Op.B), ("FR", Op.I), ("FRI", Op.W)})
"""(actions of a microbatch on a worker so far, the next op); `EARLY` if its stage recomputes with R actions."""

Key = tuple[int, int, int, int]
"""(stage, replica, microbatch, part)."""


def structure(schedule: Schedule) -> Iterator[Violation]:
    """Checks all laws that need no run, the easiest to understand first."""
    for fault in faults(schedule):
        yield Violation(Law.PLACEMENT, 0, 0, None, fault)
        return
    yield from _units(schedule)
    yield from _shape(schedule)
    for worker, entries in enumerate(schedule.lists):
        yield from _placed(schedule, worker, entries)
    for worker, entries in enumerate(schedule.lists):
        yield from _microbatches(schedule, worker, entries)
    yield from _complete(schedule)
    yield from rounds(schedule)
    yield from _turns(schedule)


def refuse_broken(schedule: Schedule) -> None:
    """Raises on the first structural law that is broken. Lowering relies on these laws."""
    for found in structure(schedule):
        raise broken(schedule, found.law.value, found.worker, found.entry, found.reason)


def _units(schedule: Schedule) -> Iterator[Violation]:
    for group in schedule.ties:
        if len(set(group)) != len(group) or len(group) < 2 or not all(0 <= stage < schedule.stages for stage in group):
            yield Violation(Law.UNIT, 0, 0, None, f"the tie {group} is not two or more different stages of {schedule.stages}")


def _shape(schedule: Schedule) -> Iterator[Violation]:
    if len(schedule.lists) != schedule.workers:
        reason = f"the placement has {schedule.workers} workers, but there are {len(schedule.lists)} lists"
        yield Violation(Law.PLACEMENT, 0, 0, None, reason)
    if schedule.recompute is not None and len(schedule.recompute) != schedule.stages:
        reason = f"there are {schedule.stages} stages, but recompute has {len(schedule.recompute)}"
        yield Violation(Law.PLACEMENT, 0, 0, None, reason)
    for channel in schedule.channels:
        for a in channel.producers:
            reader = a.stage + 1 if a.op is Op.F else a.stage - 1
            known = (
                0 <= a.replica < schedule.placement.replicas and 0 <= a.stage < schedule.stages and 0 <= reader < schedule.stages
            )
            if not known or a.op not in (Op.F, Op.B, Op.I):
                yield Violation(Law.CHANNEL, channel.workers[0], 0, None, f"the channel {channel.workers} cannot carry {a}")
    if schedule.owners and not schedule.forward_only and (schedule.flush or not schedule.ring):
        reason = "stages have owners: gradients go to them along a ring, and there is no flush"
        yield Violation(Law.PLACEMENT, 0, 0, None, reason)
    yield from _halved(schedule)
    if not any(schedule.lists):
        yield Violation(Law.ONCE, 0, 0, None, "all lists are empty")


def _halved(schedule: Schedule) -> Iterator[Violation]:
    """Teams split rows, also inside a part: a piece of a part may only be sent if that piece exists for the whole."""
    placement, parts = schedule.placement, schedule.parts
    if parts == 1 or not placement.rows:
        return
    for replica in placement.teams:
        for source, target in ((a, b) for before, after in pairwise(replica) for a in before for b in after):
            sent = {piece for piece, *_ in placement.pieces(source, target)}
            for part in (Rows(0, placement.rows).cut(index, parts) for index in range(parts)):
                pieces = range(len(source) * len(target)) if (len(source), len(target)) != (1, 1) else ()
                for piece in pieces:
                    if piece not in sent and part.piece(piece, len(source), len(target)).size:
                        reason = (
                            f"{parts} parts of {placement.rows} rows are split differently from all rows "
                            f"between teams {source} and {target}"
                        )
                        yield Violation(Law.PLACEMENT, source[0], 0, None, reason)
                        return


def _placed(schedule: Schedule, worker: int, entries: tuple[Entry, ...]) -> Iterator[Violation]:
    """Every action is on a worker that holds its stage (for its microbatch), and every index is in range."""
    placement = schedule.placement
    parts = (NONE, *range(schedule.parts)) if schedule.parts > 1 else (NONE,)
    one_team = {pair for pair in placement.held[worker] if len(placement.teams[pair[0]][pair[1]]) == 1}
    for index, entry in enumerate(entries):
        if type(entry) is Action and (entry.replica, entry.stage) in one_team and entry.part == NONE and entry.op in COMPUTE:
            continue
        if isinstance(entry, Transfer):
            if not schedule.lowered:
                yield Violation(Law.PLACEMENT, worker, index, entry, "only a lowered schedule has sends and receives")
            if not 0 <= entry.peer < schedule.workers or entry.peer == worker:
                yield Violation(Law.PLACEMENT, worker, index, entry, f"there is no other worker {entry.peer}")
            continue
        if isinstance(entry, Cell) and not all(action.op in COMPUTE for action in entry):
            yield Violation(Law.PLACEMENT, worker, index, entry, "a cell overlaps two computations, and nothing else")
        for action in actions(entry):
            if action.op in COMPUTE:
                in_range = 0 <= action.stage < schedule.stages and 0 <= action.replica < placement.replicas
                if not in_range or action.part not in parts:
                    reason = f"there are {schedule.stages} stages, {placement.replicas} replicas, {schedule.parts} parts"
                    yield Violation(Law.PLACEMENT, worker, index, entry, reason)
                elif worker not in (team := placement.team(action.replica, action.stage, action.mb)):
                    where = " and ".join(map(str, team))
                    yield Violation(Law.PLACEMENT, worker, index, entry, f"{action} belongs on worker {where}")
            elif action.op is Op.G and schedule.sharding is Sharding.NONE:
                yield Violation(Law.PLACEMENT, worker, index, entry, "parameters are not sharded here, so nothing is gathered")
            elif action.op is not Op.N and (
                not 0 <= action.stage < schedule.units
                or worker not in (schedule.runners if action.op is Op.S else schedule.holders)[action.stage]
            ):
                yield Violation(Law.PLACEMENT, worker, index, entry, f"worker {worker} does not hold unit {action.stage}")


def _microbatches(schedule: Schedule, worker: int, entries: tuple[Entry, ...]) -> Iterator[Violation]:
    """Per (stage, replica, microbatch, part): F, then R if it is early, then B, or I and W; each once, all at one version."""
    recompute = schedule.recompute or ()
    halves = tuple(range(schedule.parts)) if schedule.parts > 1 else (NONE,)
    one_version, microbatches = schedule.flush and not schedule.forward_only, schedule.microbatches
    done: dict[Key, str] = {}
    version: dict[Key, int] = {}
    where: dict[Key, tuple[int, Entry]] = {}
    for index, entry in enumerate(entries):
        for action in actions(entry):
            if action.op not in COMPUTE:
                continue
            if one_version and action.version < (round_ := action.mb // microbatches):
                reason = f"reads version {action.version} in round {round_}: with a flush only version {round_} exists then"
                yield Violation(Law.VERSION, worker, index, entry, reason)
            parts = halves if action.part == NONE and schedule.parts > 1 else (action.part,)
            for part in parts:
                key = (action.stage, action.replica, action.mb, part)
                before = done.get(key, "")
                early = bool(recompute) and recompute[action.stage].early and recompute[action.stage].share > 0
                if (before, action.op) not in (EARLY if early else PLAIN):
                    reason = _why_not(before, action, early)
                    yield Violation(Law.ONCE if action.op.value in before else Law.ORDER, worker, index, entry, reason)
                if version.setdefault(key, action.version) != action.version:
                    reason = f"reads version {action.version}, its forward read {version[key]}"
                    yield Violation(Law.VERSION, worker, index, entry, reason)
                done[key] = before + action.op.value
                where[key] = (index, entry)
    for key, history in () if schedule.forward_only else done.items():
        if history[-1] not in "BW":
            index, entry = where[key]
            missing = "W" if history[-1] == "I" else "backward"
            reason = f"stage {key[0]}, microbatch {key[2]} ends with {history[-1]}: its {missing} is missing"
            yield Violation(Law.ONCE, worker, index, entry, reason)


def _why_not(before: str, action: Action, early: bool) -> str:
    """Returns why this action cannot come after what its microbatch has done on the worker."""
    op = action.op
    if op.value in before:
        return f"{action} comes twice"
    if op is Op.R and not early:
        return f"stage {action.stage} does not recompute with R actions"
    if op is Op.W:
        return "its I must come before it"
    if "B" in before or "I" in before:
        return "its backward is already done"
    if op is Op.F:
        return f"it comes after {before}"
    return "its recompute must come before it" if early and before == "F" else "its forward must come before it"


def _complete(schedule: Schedule) -> Iterator[Violation]:
    """Every microbatch runs on one replica, on all stages, on every worker of its team, and reads one version per stage."""
    placement = schedule.placement
    halves = range(schedule.parts) if schedule.parts > 1 else (NONE,)
    seen: set[tuple[int, int, int, int, int]] = set()
    begin, end = (round_ * schedule.microbatches for round_ in (schedule.first, schedule.first + schedule.steps))
    replica_of: dict[int, int] = {}
    version_of: dict[tuple[int, int], int] = {}
    for worker, entries in enumerate(schedule.lists):
        for index, entry in enumerate(entries):
            for action in actions(entry):
                if action.op is not Op.F:
                    continue
                if action.mb < begin:
                    reason = f"the first round is {schedule.first}, with microbatches from {begin} on"
                    yield Violation(Law.ONCE, worker, index, entry, reason)
                if replica_of.setdefault(action.mb, action.replica) != action.replica:
                    reason = f"microbatch {action.mb} already runs on replica {replica_of[action.mb]}"
                    yield Violation(Law.ONCE, worker, index, entry, reason)
                if (first := version_of.setdefault((action.stage, action.mb), action.version)) != action.version:
                    reason = f"reads version {action.version}, but other rows of microbatch {action.mb} read {first} there"
                    yield Violation(Law.VERSION, worker, index, entry, reason)
                for part in (action.part,) if action.part != NONE or schedule.parts == 1 else halves:
                    seen.add((worker, action.stage, action.replica, action.mb, part))
    for mb in range(begin, end):
        if mb not in replica_of:
            yield Violation(Law.ONCE, 0, 0, None, f"microbatch {mb} does not run at all")
            continue
        replica = replica_of[mb]
        for stage in range(schedule.stages):
            for worker in placement.team(replica, stage, mb):
                for part in halves:
                    if (worker, stage, replica, mb, part) not in seen:
                        missing = Action(Op.F, stage, mb, replica, part=part)
                        yield Violation(Law.ONCE, worker, 0, missing, f"{missing} is missing on worker {worker}")


def _turns(schedule: Schedule) -> Iterator[Violation]:
    """Both actions of a turn exist, except in rounds that this run does not reach."""
    if not schedule.turns:
        return
    given = (schedule.lists, schedule.prologue, schedule.period, schedule.drain)
    there = {action for lists in given for entries in lists for action in walk(entries)}
    for turn in schedule.turns:
        for action in turn:
            round_ = action.mb // schedule.microbatches if action.op in COMPUTE else action.version
            if action not in there and round_ < schedule.first + schedule.steps:
                reason = f"the turn from {turn[0]} to {turn[1]} names {action}, which no worker runs"
                yield Violation(Law.READ, 0, 0, action, reason)


def border(schedule: Schedule) -> Iterator[Violation]:
    """The values alive after the period are those alive before it, shifted by one period."""
    if schedule.lowered or not schedule.prologue or not schedule.period or not schedule.repeats:
        return
    of = rule(schedule)
    for worker in range(schedule.workers):
        first = _alive(of, worker, (schedule.prologue[worker],))
        second = _alive(of, worker, (schedule.prologue[worker], schedule.period[worker]))
        moved = {value.shifted(schedule.microbatches, 1) for value in first}
        if odd := sorted(map(str, moved ^ second)):
            reason = f"{odd[0]} is alive at one border of worker {worker} but not at the other"
            last = len(schedule.prologue[worker]) + len(schedule.period[worker]) - 1
            yield Violation(Law.BORDER, worker, last, schedule.lists[worker][last], reason)


def _alive(of: object, worker: int, parts: Lists) -> set[Value]:
    """Returns the activations that are alive on a worker after these lists."""
    alive: set[Value] = set()
    for entry in (entry for entries in parts for entry in entries):
        effect = of(worker, entry)  # type: ignore[operator]
        alive |= {value for value in effect.writes if value.kind in ACTIVATIONS}
        alive -= set(effect.reads)
    return alive
