"""The laws that can be seen by counting: who does what, how often, where, and in which order in its own list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.ir.action import COMPUTE, NONE, Action, Cell, Entry, Op, Transfer, Value, actions, walk
from meshwright.ir.analysis.effects import ACTIVATIONS, rule
from meshwright.ir.placement import Rows
from meshwright.ir.schedule import Lists, Schedule
from meshwright.passes.round_laws import rounds
from meshwright.passes.violation import Law, Violation, broken
from meshwright.passes.wellformed import faults

__all__ = ["Law", "Violation", "border", "broken", "refuse_broken", "structure"]


PLAIN = frozenset({("", Op.F), ("F", Op.B), ("F", Op.I), ("FI", Op.W)})
EARLY = frozenset({("", Op.F), ("F", Op.R), ("FR", Op.B), ("FR", Op.I), ("FRI", Op.W)})
"""What may follow what a microbatch has done on a worker; `EARLY` where its stage recomputes by R actions."""

Key = tuple[int, int, int, int]
"""(stage, replica, microbatch, part)."""


def structure(schedule: Schedule) -> Iterator[Violation]:
    """All laws that need no run, in the order in which they are easiest to understand."""
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
    """Raise on the first law that is broken before anything runs: lowering needs what these laws promise."""
    for found in structure(schedule):
        raise broken(schedule, found.law.value, found.worker, found.entry, found.reason)


def _units(schedule: Schedule) -> Iterator[Violation]:
    for group in schedule.ties:
        if len(set(group)) != len(group) or len(group) < 2 or not all(0 <= stage < schedule.stages for stage in group):
            yield Violation(Law.UNIT, 0, 0, None, f"the tie {group} is not two or more different stages of {schedule.stages}")


def _shape(schedule: Schedule) -> Iterator[Violation]:
    if len(schedule.lists) != schedule.workers:
        reason = f"the placement has {schedule.workers} workers, there are {len(schedule.lists)} lists"
        yield Violation(Law.PLACEMENT, 0, 0, None, reason)
    if schedule.recompute is not None and len(schedule.recompute) != schedule.stages:
        reason = f"there are {schedule.stages} stages, recompute names {len(schedule.recompute)}"
        yield Violation(Law.PLACEMENT, 0, 0, None, reason)
    for channel in schedule.channels:
        for a in channel.producers:
            reader = a.stage + 1 if a.op is Op.F else a.stage - 1
            known = (
                0 <= a.replica < schedule.placement.replicas and 0 <= a.stage < schedule.stages and 0 <= reader < schedule.stages
            )
            if not known or a.op not in (Op.F, Op.B, Op.I):
                yield Violation(Law.CHANNEL, channel.workers[0], 0, None, f"the channel {channel.workers} cannot carry {a}")
    yield from _halved(schedule)
    if not any(schedule.lists):
        yield Violation(Law.ONCE, 0, 0, None, "there is nothing in any list")


def _halved(schedule: Schedule) -> Iterator[Violation]:
    """Where parts of a given number of rows are shared by teams, what crosses in a part must be sent for the whole."""
    placement, parts = schedule.placement, schedule.parts
    if parts == 1 or not placement.rows:
        return
    for copy in placement.teams:
        for source, target in ((a, b) for before, behind in pairwise(copy) for a in before for b in behind):
            sent = {piece for piece, *_ in placement.pieces(source, target)}
            for part in (Rows(0, placement.rows).cut(index, parts) for index in range(parts)):
                pieces = range(len(source) * len(target)) if (len(source), len(target)) != (1, 1) else ()
                for piece in pieces:
                    if piece not in sent and part.piece(piece, len(source), len(target)).size:
                        reason = (
                            f"{parts} parts of {placement.rows} rows cross from team {source} to {target} otherwise than all rows"
                        )
                        yield Violation(Law.PLACEMENT, source[0], 0, None, reason)
                        return


def _placed(schedule: Schedule, worker: int, entries: tuple[Entry, ...]) -> Iterator[Violation]:
    """Every action on a worker that holds its stage (for its microbatch), every index in range."""
    placement = schedule.placement
    parts = (NONE, *range(schedule.parts)) if schedule.parts > 1 else (NONE,)
    alone = {pair for pair in placement.held[worker] if len(placement.teams[pair[0]][pair[1]]) == 1}
    for index, entry in enumerate(entries):
        if type(entry) is Action and (entry.replica, entry.stage) in alone and entry.part == NONE and entry.op in COMPUTE:
            continue
        if isinstance(entry, Transfer):
            if not schedule.lowered:
                yield Violation(Law.PLACEMENT, worker, index, entry, "only a lowered schedule has sends and receives")
            if not 0 <= entry.peer < schedule.workers or entry.peer == worker:
                yield Violation(Law.PLACEMENT, worker, index, entry, f"there is no other worker {entry.peer}")
            continue
        if isinstance(entry, Cell) and not all(action.op in COMPUTE for action in entry):
            yield Violation(Law.PLACEMENT, worker, index, entry, "a cell overlaps two computations, nothing else")
        for action in actions(entry):
            if action.op in COMPUTE:
                in_range = 0 <= action.stage < schedule.stages and 0 <= action.replica < placement.replicas
                if not in_range or action.part not in parts:
                    reason = f"there are {schedule.stages} stages, {placement.replicas} replicas, {schedule.parts} parts"
                    yield Violation(Law.PLACEMENT, worker, index, entry, reason)
                elif worker not in (team := placement.team(action.replica, action.stage, action.mb)):
                    where = " and ".join(map(str, team))
                    yield Violation(Law.PLACEMENT, worker, index, entry, f"{action} belongs on worker {where}")
            elif action.op is Op.G:
                yield Violation(Law.PLACEMENT, worker, index, entry, "parameters are whole here, nothing is gathered")
            elif action.op is not Op.N and (
                not 0 <= action.stage < schedule.units or worker not in schedule.holders[action.stage]
            ):
                yield Violation(Law.PLACEMENT, worker, index, entry, f"worker {worker} does not hold unit {action.stage}")


def _microbatches(schedule: Schedule, worker: int, entries: tuple[Entry, ...]) -> Iterator[Violation]:
    """Per (stage, replica, microbatch, part): F, then R where it is early, then B or I and W, each once and at one version."""
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
                reason = f"reads version {action.version} in round {round_}: with a flush there is only version {round_} by then"
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
    """Why this action cannot follow what its microbatch has done on the worker."""
    op = action.op
    if op.value in before:
        return f"{action} comes twice"
    if op is Op.R and not early:
        return f"stage {action.stage} does not recompute by actions of its own"
    if op is Op.W:
        return "its I must come before it"
    if "B" in before or "I" in before:
        return "its backward has been done"
    if op is Op.F:
        return f"it comes after {before}"
    return "its recompute must come before it" if early and before == "F" else "its forward must come before it"


def _complete(schedule: Schedule) -> Iterator[Violation]:
    """Every microbatch of every round runs on one replica, on all stages, on every worker of its team, at one version a stage."""
    placement = schedule.placement
    halves = range(schedule.parts) if schedule.parts > 1 else (NONE,)
    seen: set[tuple[int, int, int, int, int]] = set()
    replica_of: dict[int, int] = {}
    version_of: dict[tuple[int, int], int] = {}
    for worker, entries in enumerate(schedule.lists):
        for index, entry in enumerate(entries):
            for action in actions(entry):
                if action.op is not Op.F:
                    continue
                if replica_of.setdefault(action.mb, action.replica) != action.replica:
                    reason = f"microbatch {action.mb} runs on replica {replica_of[action.mb]} already"
                    yield Violation(Law.ONCE, worker, index, entry, reason)
                if (first := version_of.setdefault((action.stage, action.mb), action.version)) != action.version:
                    reason = f"reads version {action.version}, and other rows of microbatch {action.mb} read {first} there"
                    yield Violation(Law.VERSION, worker, index, entry, reason)
                for part in (action.part,) if action.part != NONE or schedule.parts == 1 else halves:
                    seen.add((worker, action.stage, action.replica, action.mb, part))
    for mb in range(schedule.steps * schedule.microbatches):
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
    """Both ends of a turn are there, but for those of rounds that this run does not reach: a turn ends with its run."""
    if not schedule.turns:
        return
    given = (schedule.lists, schedule.prologue, schedule.period, schedule.drain)
    there = {action for lists in given for entries in lists for action in walk(entries)}
    for turn in schedule.turns:
        for action in turn:
            round_ = action.mb // schedule.microbatches if action.op in COMPUTE else action.version
            if action not in there and round_ < schedule.steps:
                yield Violation(Law.READ, 0, 0, action, f"the turn from {turn[0]} to {turn[1]} names {action}, which nobody runs")


def border(schedule: Schedule) -> Iterator[Violation]:
    """What is alive between prologue and period is, one period later, what is alive behind the period."""
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
    """The activations that a run of lists leaves on its worker."""
    alive: set[Value] = set()
    for entry in (entry for entries in parts for entry in entries):
        effect = of(worker, entry)  # type: ignore[operator]
        alive |= {value for value in effect.writes if value.kind in ACTIVATIONS}
        alive -= set(effect.reads)
    return alive
