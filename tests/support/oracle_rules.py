"""What the oracle knows of the design: what every action needs and gives, and how often everything must be there.

A fact is a tuple: what it is, whose it is, and its numbers. "takes" are used up, "looks" are not, "gives" are new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import lcm

from meshwright import Action, Cell, Op, Schedule, Transfer, Value

Fact = tuple[object, ...]
Place = tuple[int, int]
WHOLE = -1
COMPUTE = (Op.F, Op.R, Op.B, Op.I, Op.W)
LASTING = ("sum", "norm", "param", "opt")
"""Facts that may be left when a run ends."""


def actions_of(entry: Action | Cell | Transfer) -> tuple[Action, ...]:
    """An action, the two of a cell, or none."""
    if isinstance(entry, Transfer):
        return ()
    return (entry,) if isinstance(entry, Action) else (entry.first, entry.second)


def evaluates(schedule: Schedule) -> bool:
    """Does nothing run but forwards? Nobody needs what they would save, and there is nothing to sync or update."""
    return {a.op for entries in schedule.lists for entry in entries for a in actions_of(entry)} == {Op.F}


def fact_of(value: Value) -> Fact:
    """What a message carries, in our names."""
    kind = value.kind.value
    if kind in ("act", "grad"):
        return (kind, value.stage, value.replica, value.mb, value.part, value.piece)
    if kind == "turn":
        return ("turn", list(Op)[value.piece], value.stage, value.replica, value.mb, value.part)
    if kind == "partial":
        return ("partial", value.stage, value.version, value.piece)
    if kind == "sum" and value.piece == WHOLE:
        return ("sum", "ring", value.stage, value.version)
    if kind == "param" and value.part != WHOLE:
        return ("param", "tour", value.stage, value.version, value.part)
    return (kind, "as it stands", str(value))


class Needs:
    """What an action takes, looks at and gives."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        teams = [team for copy in schedule.placement.teams for stage in copy for team in stage]
        self.rows = schedule.placement.rows or lcm(*map(len, teams))
        self.holders = holders(schedule)
        self.gradients: dict[tuple[int, int, int], list[Action]] = defaultdict(list)
        self.normed: set[Place] = set()
        self.version: dict[tuple[int, int, int], int] = {}
        everything = [(w, a) for w, entries in enumerate(schedule.lists) for entry in entries for a in actions_of(entry)]
        for worker, action in everything:
            if action.op is Op.B or action.op is Op.W:
                for unit in units_of(schedule, action.stage):
                    self.gradients[worker, unit, action.mb // schedule.microbatches].append(action)
            elif action.op is Op.N:
                self.normed.add((worker, action.version))
            elif action.op is Op.F:
                self.version[action.stage, action.replica, action.mb] = action.version
        self.evaluates = evaluates(schedule)
        here = {action for _, action in everything}
        self.gives_turn: dict[Action, list[Fact]] = defaultdict(list)
        self.takes_turn: dict[Action, list[Fact]] = defaultdict(list)
        for first, then in schedule.turns:
            if first in here and then in here:
                fact = ("turn", then.op, then.stage, then.replica, then.mb, then.part)
                self.gives_turn[first].append(fact)
                self.takes_turn[then].append(fact)

    def at_start(self, worker: int) -> list[Fact]:
        """Version 0 of what a worker holds, and its optimizer state."""
        held, ops = self._held_by(worker), (Op.F, Op.B) if self.schedule.owners else (Op.F,)
        return [("opt", worker, unit, 0) for unit in held] + [self._param(worker, unit, 0, op) for unit in held for op in ops]

    def _param(self, worker: int, unit: int, version: int, op: Op) -> Fact:
        """The parameters that an op reads: its worker's, or where units have owners those that tour the forwards or backwards."""
        return ("param", "tour", unit, version, int(op is not Op.F)) if self.schedule.owners else ("param", worker, unit, version)

    def of(self, worker: int, action: Action) -> tuple[list[Fact], list[Fact], list[Fact]]:
        """(takes, looks, gives)."""
        takes, looks, gives = self._of(worker, action)
        return takes + self.takes_turn.get(action, []), looks, gives + self.gives_turn.get(action, [])

    def _held_by(self, worker: int) -> list[int]:
        return [unit for unit, workers in enumerate(self.holders) if worker in workers]

    def _of(self, worker: int, action: Action) -> tuple[list[Fact], list[Fact], list[Fact]]:
        op, stage = action.op, action.stage
        own = (worker, stage, action.replica, action.mb)
        how = self.schedule.recompute[stage] if self.schedule.recompute and op in COMPUTE else None
        drops, early = (how.share > 0, how.early) if how else (False, False)
        looks = self._weights(worker, action) if op in COMPUTE else []
        match op:
            case Op.F:
                halves = range(self.schedule.parts) if action.part == WHOLE and self.schedule.parts > 1 else [action.part]
                keeps: list[Fact] = [("kept" if drops else "saved", *own, part) for part in halves if not self.evaluates]
                return self.crossing("act", action, worker, "in"), looks, keeps + self.crossing("act", action, worker, "out")
            case Op.R:
                return [("kept", *own, action.part)], looks, [("saved", *own, action.part)]
            case Op.B | Op.I:
                stash: Fact = ("kept" if drops and not early else "saved", *own, action.part)
                left = self._gradient(worker, action) if op is Op.B else [("rest", *own, action.part)]
                takes = [stash, *self.crossing("grad", action, worker, "in")]
                return takes, looks, left + self.crossing("grad", action, worker, "out")
            case Op.W:
                return [("rest", *own, action.part)], looks, self._gradient(worker, action)
            case Op.S:
                return self._sync(worker, action)
            case Op.N:
                sums = [self._sum(worker, unit, action.version) for unit in self._held_by(worker)]
                return [], sums, [("norm", worker, action.version)]
            case Op.U:
                k = action.version
                looks = [self._sum(worker, stage, k), self._param(worker, stage, k, Op.F), ("opt", worker, stage, k)]
                looks += [("norm", worker, k)] if (worker, k) in self.normed else []
                made = {self._param(worker, stage, k + 1, op) for op in (Op.F, Op.B)}
                return [], looks, [*sorted(made, key=str), ("opt", worker, stage, k + 1)]
        raise AssertionError(op)

    def crossing(self, kind: str, action: Action, worker: int, way: str) -> list[Fact]:
        """The row pieces that this worker gets from, or gives to, the team on the other side of a cut between stages."""
        forward = kind == "act"
        cut = action.stage - 1 if forward == (way == "in") else action.stage
        if not 0 <= cut < self.schedule.stages - 1:
            return []
        before, behind = (team_of(self.schedule, action._replace(stage=cut + k)) for k in (0, 1))
        facts: list[Fact] = []
        for i, left in enumerate(before):
            for j, right in enumerate(behind):
                mine = right if forward == (way == "in") else left
                number = WHOLE if len(before) == len(behind) == 1 else i * len(behind) + j
                if mine == worker and self._share(i, len(before)) & self._share(j, len(behind)):
                    facts.append((kind, cut, action.replica, action.mb, action.part, number))
        return facts

    def _share(self, index: int, width: int) -> set[int]:
        return {row for row in range(self.rows) if self.rows * index // width <= row < self.rows * (index + 1) // width}

    def _weights(self, worker: int, action: Action) -> list[Fact]:
        """The stage's own parameters at the action's version; a tied group's at the version its first stage reads."""
        found = [self._param(worker, action.stage, action.version, action.op)]
        for unit in units_of(self.schedule, action.stage)[1:]:
            first = self.schedule.ties[unit - self.schedule.stages][0]
            version = self.version.get((first, action.replica, action.mb), action.version)
            found.append(self._param(worker, unit, version, action.op))
        return found

    def _gradient(self, worker: int, action: Action) -> list[Fact]:
        tail = (action.stage, action.replica, action.mb, action.part)
        return [("gradient", worker, unit, *tail) for unit in units_of(self.schedule, action.stage)]

    def _sum(self, worker: int, unit: int, round_: int) -> Fact:
        return ("sum", "ring" if self.schedule.ring else worker, unit, round_)

    def _sync(self, worker: int, action: Action) -> tuple[list[Fact], list[Fact], list[Fact]]:
        """All gradients of a round on this worker in; out comes the sum, or in a ring what goes on to the next worker."""
        unit, round_ = action.stage, action.version
        made = self.gradients[worker, unit, round_]
        takes: list[Fact] = [("gradient", worker, unit, a.stage, a.replica, a.mb, a.part) for a in made]
        if not self.schedule.ring:
            return takes, [], [self._sum(worker, unit, round_)]
        # Who finishes first adds first. Of two stages of a tie, the later one runs its backward of a microbatch earlier.
        last = {
            w: max((2 * a.mb - a.stage, -a.stage) for a in made)
            for (w, u, r), made in self.gradients.items()
            if (u, r) == (unit, round_) and made
        }
        ring = sorted(sorted(last), key=lambda w: last[w])
        if worker in ring[1:]:
            takes.append(("partial", unit, round_, ring[ring.index(worker) - 1]))
        ends = bool(ring) and worker == ring[-1]
        return takes, [], [self._sum(worker, unit, round_) if ends else ("partial", unit, round_, worker)]


def miscounted(schedule: Schedule) -> str:
    """What is there too often, too seldom, on the wrong worker or in the wrong order of one list; empty if nothing."""
    if len(schedule.lists) != schedule.workers:
        return f"{schedule.workers} workers, {len(schedule.lists)} lists"
    if any(len(set(tied)) < max(2, len(tied)) or max(tied, default=0) >= schedule.stages for tied in schedule.ties):
        return "a tie joins two or more different stages"
    histories: dict[tuple[int, ...], list[Action]] = defaultdict(list)
    rounds: dict[tuple[Op, int, int, int], int] = defaultdict(int)
    held, run = holders(schedule), runners(schedule)
    for worker, entries in enumerate(schedule.lists):
        for entry in entries:
            if isinstance(entry, Transfer):
                if entry.peer == worker or not 0 <= entry.peer < schedule.workers:
                    return f"{entry} on worker {worker} has no other end"
                continue
            for action in actions_of(entry):
                if action.op not in COMPUTE:
                    if action.op is Op.G or (isinstance(entry, Cell) and action.op in (Op.S, Op.N)):
                        return f"{entry} is not for here"
                    where = run if action.op is Op.S else held
                    if action.op is not Op.N and (action.stage >= len(held) or worker not in where[action.stage]):
                        return f"{action} on worker {worker}, which does not hold it"
                    rounds[action.op, worker, action.stage, action.version] += 1
                    continue
                if not _in_range(schedule, action) or worker not in team_of(schedule, action):
                    return f"{action} on worker {worker}"
                halves = range(schedule.parts) if action.part == WHOLE and schedule.parts > 1 else [action.part]
                for part in halves:
                    histories[worker, action.stage, action.replica, action.mb, part].append(action)
    return _histories(schedule, histories) or _rounds(schedule, rounds)


def units_of(schedule: Schedule, stage: int) -> list[int]:
    """The units whose parameters a stage uses, its own first."""
    return [stage, *(schedule.stages + i for i, tied in enumerate(schedule.ties) if stage in tied)]


def holders(schedule: Schedule) -> list[list[int]]:
    """For each unit the owner of its first stage, or all workers that run it."""
    firsts = [*range(schedule.stages), *(tied[0] for tied in schedule.ties)]
    return [[schedule.owners[stage]] for stage in firsts] if schedule.owners else runners(schedule)


def runners(schedule: Schedule) -> list[list[int]]:
    """For each unit the workers that run a stage of it, in any replica and team."""
    copies = schedule.placement.teams
    stages = [{w for copy in copies for team in copy[stage] for w in team} for stage in range(schedule.stages)]
    return [sorted(workers) for workers in [*stages, *({w for s in tied for w in stages[s]} for tied in schedule.ties)]]


def _in_range(schedule: Schedule, action: Action) -> bool:
    parts = range(schedule.parts) if schedule.parts > 1 else ()
    return (
        action.stage < schedule.stages
        and action.replica < schedule.placement.replicas
        and (action.part == WHOLE or action.part in parts)
    )


def team_of(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Who shares the rows of an action's microbatch."""
    teams = schedule.placement.teams[action.replica][action.stage]
    return teams[action.mb % len(teams)]


def _histories(schedule: Schedule, histories: dict[tuple[int, ...], list[Action]]) -> str:
    """Each stage of each microbatch: F, (R,) B or F, (R,) I, W on all workers of its team, at one version, on one replica."""
    for key, history in histories.items():
        how = schedule.recompute[key[1]] if schedule.recompute else None
        again = "R" if how and how.early and how.share > 0 else ""
        done = "".join(action.op.value for action in history)
        if done not in (("F",) if evaluates(schedule) else (f"F{again}B", f"F{again}IW")):
            return f"stage {key[1]}, microbatch {key[3]} on worker {key[0]} runs {done}"
        if len({action.version for action in history}) > 1:
            return f"stage {key[1]}, microbatch {key[3]} changes its version"
    if not histories:
        return "nothing runs"
    replica = {mb: replica for _, _, replica, mb, _ in histories}
    if len({(mb, copy) for _, _, copy, mb, _ in histories}) > len(replica):
        return "a microbatch runs on two replicas"
    for mb in range(_steps(schedule, list(replica)) * schedule.microbatches):
        for stage in range(schedule.stages):
            for part in range(schedule.parts) if schedule.parts > 1 else [WHOLE]:
                for worker in team_of(schedule, Action(Op.F, stage, mb, replica.get(mb, 0))):
                    if (worker, stage, replica.get(mb, 0), mb, part) not in histories:
                        return f"stage {stage}, microbatch {mb} does not run on worker {worker}"
    return ""


def _rounds(schedule: Schedule, rounds: dict[tuple[Op, int, int, int], int]) -> str:
    """Once a round: S and U on every holder of a unit, N on every worker; what lowering has still to add may be missing."""
    if evaluates(schedule):
        return ""
    mbs = [a.mb for entries in schedule.lists for entry in entries for a in actions_of(entry) if a.op in COMPUTE]
    steps = range(_steps(schedule, mbs))
    every = {
        op: {(op, w, unit, k) for unit, workers in enumerate(holders(schedule)) for w in workers for k in steps}
        for op in (Op.S, Op.U)
    }
    if schedule.ring:
        every[Op.S] = {(Op.S, *key) for key in _contributions(schedule)}
    reduces = schedule.norm or not schedule.lowered
    every[Op.N] = {(Op.N, w, WHOLE, k) for w in range(schedule.workers) for k in steps if reduces}
    for op, wanted in every.items():
        found = {key for key in rounds if key[0] is op}
        may_lack = not (schedule.norm if op is Op.N else schedule.lowered)
        if found != wanted and (found or not may_lack):
            return f"{op.value}: {sorted(map(str, found ^ wanted))[0]} is missing or too much"
    twice = [key for key, count in rounds.items() if count > 1]
    return f"{twice[0]} comes twice" if twice else ""


def _contributions(schedule: Schedule) -> set[tuple[int, int, int]]:
    """(worker, unit, round) for every gradient that a worker adds; the others in a ring only get the sum."""
    return {
        (worker, unit, action.mb // schedule.microbatches)
        for worker, entries in enumerate(schedule.lists)
        for entry in entries
        for action in actions_of(entry)
        if action.op is Op.B or action.op is Op.W
        for unit in units_of(schedule, action.stage)
    }


def _steps(schedule: Schedule, mbs: Sequence[int]) -> int:
    return -(-(max(mbs, default=-1) + 1) // schedule.microbatches)
