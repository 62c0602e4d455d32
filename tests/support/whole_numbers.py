"""A third opinion: runs lowered lists on numbers, with every message and collective blocking, and compares with one process.

It shares no code with the checker or the runtime. A stage is a function that mixes whole numbers row by row; parameters,
gradients and norms are whole numbers modulo a prime, so that any row, version, copy or order that is not the right one
gives another result. It does what a run does and nothing more:

    parameters   with a flush one copy on every holder, changed in place; without one a copy per version
    gradients    one buffer per unit and round on every holder; a collective leaves the total in all of them, a ring sends
                 what is in them, an update reads what is in them
    messages     act, grad and turn, in a ring also partial and sum; first in, first out on a channel, whatever they are called
    norms        the last one that a worker has taken
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import lcm

from meshwright import Action, Cell, Op, Schedule

PRIME = (1 << 61) - 1
WHOLE = -1
Rows = dict[int, int]
"""A number for each row of a microbatch."""
Key = tuple[object, ...]


class WrongError(Exception):
    """A run that gets stuck, lacks something, or does what no run can."""


def mix(*words: int) -> int:
    """A number that depends on all words and on their order."""
    found = 88172645463325252
    for word in words:
        found = (found ^ (word % PRIME)) * 6364136223846793005 % PRIME
        found ^= found >> 29
    return found % PRIME


class Shape:
    """What the lists do not say: who shares which rows, which units a stage has, who holds them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.teams, self.parts = schedule, schedule.placement.teams, schedule.parts
        widths = [len(team) for copy in self.teams for stage in copy for team in stage]
        self.rows = schedule.placement.rows or lcm(*widths) * self.parts
        self.stages = len(self.teams[0])
        self.workers = 1 + max(w for copy in self.teams for stage in copy for team in stage for w in team)
        self.units = [[s, *(self.stages + i for i, tie in enumerate(schedule.ties) if s in tie)] for s in range(self.stages)]
        self.runners: dict[int, set[int]] = defaultdict(set)
        for copy in self.teams:
            for stage, teams in enumerate(copy):
                for unit in self.units[stage]:
                    self.runners[unit] |= {worker for team in teams for worker in team}
        self.holders = {unit: self._owned(unit) or workers for unit, workers in self.runners.items()}
        self._shares: dict[tuple[int, int, int], frozenset[int]] = {}

    def _owned(self, unit: int) -> set[int]:
        """The worker that keeps a unit for all others, if there is one: a tie goes with its first stage."""
        stage = unit if unit < self.stages else self.schedule.ties[unit - self.stages][0]
        return {self.schedule.owners[stage]} if self.schedule.owners else set()

    def team(self, replica: int, stage: int, mb: int) -> tuple[int, ...]:
        teams = self.teams[replica][stage]
        return teams[mb % len(teams)]

    def halves(self, part: int) -> list[int]:
        return [part] if part != WHOLE else list(range(self.parts)) if self.parts > 1 else [WHOLE]

    def share(self, half: int, place: int, width: int) -> frozenset[int]:
        """The rows of one worker of a team in one half: a half is cut first, then it is shared."""
        key = (half, place, width)
        if key not in self._shares:
            index, count = (0, 1) if half == WHOLE else (half, self.parts)
            low, high = self.rows * index // count, self.rows * (index + 1) // count
            size = high - low
            self._shares[key] = frozenset(range(low + size * place // width, low + size * (place + 1) // width))
        return self._shares[key]

    def own(self, action: Action, worker: int, half: int) -> frozenset[int]:
        team = self.team(action.replica, action.stage, action.mb)
        return self.share(half, team.index(worker), len(team))

    def pieces(self, replica: int, cut: int, mb: int, part: int) -> list[tuple[int, int, int, frozenset[int]]]:
        """(number, from, to, rows) of what crosses behind stage `cut`."""
        before, behind = self.team(replica, cut, mb), self.team(replica, cut + 1, mb)
        single = len(before) == len(behind) == 1
        found = []
        for i, left in enumerate(before):
            for j, right in enumerate(behind):
                both = [self.share(h, i, len(before)) & self.share(h, j, len(behind)) for h in self.halves(part)]
                found.append((WHOLE if single else i * len(behind) + j, left, right, frozenset().union(*both)))
        return found


@dataclass
class Buffer:
    """The gradients of a unit and a round: their sum, and how many rows are in it."""

    total: int = 0
    count: int = 0

    def add(self, total: int, count: int) -> None:
        self.total, self.count = (self.total + total) % PRIME, self.count + count

    def copy(self) -> Buffer:
        return Buffer(self.total, self.count)


@dataclass
class Worker:
    """What one worker has."""

    number: int
    at: int = 0
    store: dict[Key, object] = field(default_factory=dict)
    params: dict[tuple[int, int], int] = field(default_factory=dict)
    lent: dict[tuple[int, int, int], int] = field(default_factory=dict)
    buffers: dict[tuple[int, int], Buffer] = field(default_factory=lambda: defaultdict(Buffer))
    handed: dict[tuple[int, int], Buffer] = field(default_factory=dict)
    norm: int = 0

    def take(self, key: Key) -> object:
        if key not in self.store:
            raise WrongError(f"worker {self.number} lacks {key}")
        return self.store.pop(key)


def entries_of(entry: object) -> tuple[Action, ...]:
    return (entry,) if isinstance(entry, Action) else tuple(entry) if isinstance(entry, Cell) else ()


class Lists:
    """Facts about the lists as a whole: who adds to which unit in which round, versions, turns."""

    def __init__(self, schedule: Schedule, shape: Shape) -> None:
        self.last: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        self.version: dict[tuple[int, int], int] = {}
        self.mbs: dict[int, int] = {}
        self.normed: set[tuple[int, int]] = set()
        ops = set()
        for worker, row in enumerate(schedule.lists):
            for action in (a for entry in row for a in entries_of(entry)):
                ops.add(action.op)
                if action.op in (Op.B, Op.W):
                    for unit in shape.units[action.stage]:
                        mine = self.last[unit, action.mb // schedule.microbatches]
                        ends = (2 * action.mb - action.stage, -action.stage)  # backwards of later stages end earlier
                        mine[worker] = max(mine.get(worker, ends), ends)
                elif action.op is Op.F:
                    self.version[action.stage, action.mb] = action.version
                    self.mbs[action.mb] = action.replica
                elif action.op is Op.N:
                    self.normed.add((worker, action.version))
        self.trains = ops != {Op.F}
        self.rounds = -(-(max(self.mbs) + 1) // schedule.microbatches)
        there = {a for row in schedule.lists for entry in row for a in entries_of(entry)}
        self.waits: dict[Action, list[Key]] = defaultdict(list)
        self.signals: dict[Action, list[Key]] = defaultdict(list)
        for writer, reader in schedule.turn_edges:
            if writer in there and reader in there:
                key = ("turn", reader.stage, reader.mb, reader.replica, reader.part, list(Op).index(reader.op))
                self.signals[writer].append(key)
                self.waits[reader].append(key)

    def ring(self, unit: int, round_: int) -> list[int]:
        last = self.last[unit, round_]
        return sorted(last, key=lambda worker: last[worker])


def stage_out(stage: int, weights: list[int], value: int) -> int:
    return mix(1, stage, *weights, value)


def stage_back(stage: int, weights: list[int], value: int, out: int, grad: int) -> int:
    return mix(2, stage, *weights, value, out, grad)


def stage_weight(stage: int, unit: int, weights: list[int], value: int, out: int, grad: int) -> int:
    return mix(3, stage, unit, *weights, value, out, grad)


def updated(param: int, gradient: Buffer, norm: int) -> int:
    return mix(4, param, gradient.total, gradient.count, norm)


def normed(totals: list[int]) -> int:
    return mix(5, *totals)


def start(unit: int) -> int:
    return mix(6, unit)


def data(mb: int, row: int) -> int:
    return mix(7, mb, row)


def loss_grad(mb: int, out: int) -> int:
    return mix(8, mb, out)
