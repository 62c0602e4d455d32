"""The dependency rule, in one place: what every entry reads, writes and consumes.

Checker, communication, simulator, memory curve and executor all use this file only.

    F   reads act of the previous stage, its parameters    writes act, and saved (kept if the stage recomputes);
                                                           forward-only schedules save nothing
    R   reads kept                                         writes saved
    B   reads grad of the next stage, saved (or kept)      writes grad and wgrad
    I   reads the same                                     writes grad and rest; W turns rest into wgrad
    S   reads every wgrad of its round on this worker      writes sum (in a ring: partial, the last one sum)
    N   reads the sums                                     writes norm
    U   reads sum, norm, param of version k                writes param of version k + 1

Reading an act, grad, saved, kept, rest, wgrad, partial or turn consumes it. Parameters, sums and norms are not consumed:
they live as long as a later entry of the worker's list reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Action, Entry, Kind, Op, Transfer, Value, walk
from meshwright.ir.schedule import Schedule

CONSUMED = frozenset({Kind.ACT, Kind.GRAD, Kind.SAVED, Kind.KEPT, Kind.REST, Kind.WGRAD, Kind.PARTIAL, Kind.TURN})
"""Kinds that are consumed by their reader."""

ACTIVATIONS = frozenset({Kind.SAVED, Kind.KEPT, Kind.REST})
"""Kinds that hold the activations of one stage and one microbatch."""


class Effects(NamedTuple):
    """What an entry needs before it starts and what exists when it ends."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]

    @property
    def consumes(self) -> tuple[Value, ...]:
        """The reads that are consumed."""
        return tuple(value for value in self.reads if value.kind in CONSUMED)


def effects(schedule: Schedule, worker: int, entry: Entry) -> Effects:
    """What one entry of a schedule reads and writes. This is the dependency rule.

    Args:
        schedule: The schedule that the entry stands in.
        worker: The worker whose list it stands in.
        entry: An action, a cell or a transfer.

    Returns:
        The values that must be there before it starts, and those that are there when it ends.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("gpipe", workers=2, microbatches=1)
        >>> print(*mw.effects(schedule, 0, schedule.lists[0][0]).writes)
        0act0 0saved0~0
    """
    return rule(schedule)(worker, entry)


def rule(schedule: Schedule) -> Callable[[int, Entry], Effects]:
    """Returns the rule for one schedule, with everything that depends on the whole schedule precomputed."""
    return _Rule(schedule).of


def rings(schedule: Schedule) -> dict[tuple[int, int], tuple[int, ...]]:
    """For each (unit, round) of a ring, the contributing workers in the order in which they add."""
    return _Rule(schedule).rings


class _Rule:
    """The dependency rule with its lookup tables."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last = schedule.stages - 1
        self.narrow = all(len(teams) == 1 == len(teams[0]) for replica in schedule.placement.teams for teams in replica)
        self.halves = () if schedule.parts == 1 else tuple(range(schedule.parts))
        self.recompute = schedule.recompute or ()
        self.writes_turn: dict[Action, list[Value]] = defaultdict(list)
        self.reads_turn: dict[Action, list[Value]] = defaultdict(list)
        for writer, reader in schedule.turn_edges:
            self.writes_turn[writer].append(_turn(reader))
            self.reads_turn[reader].append(_turn(reader))
        self.wgrads: dict[tuple[int, int, int], list[Value]] = defaultdict(list)
        self.normed: set[tuple[int, int]] = set()
        self.params: dict[tuple[int, int, int], tuple[Value, ...]] = {}
        self.version_at: dict[tuple[int, int, int], int] = {}
        self._scan()
        self.rings: dict[tuple[int, int], tuple[int, ...]] = self._rings() if schedule.ring else {}

    def _scan(self) -> None:
        """Collects the weight gradients of each worker and round, the rounds with a norm, and the versions that ties read."""
        schedule = self.schedule
        tied = {stages[0] for stages in schedule.ties}
        units_of, microbatches = schedule.units_of, schedule.microbatches
        for worker, entries in enumerate(schedule.lists):
            for action in walk(entries):
                op = action.op
                if op is Op.B or op is Op.W:
                    for unit in units_of[action.stage]:
                        self.wgrads[worker, unit, action.mb // microbatches].append(_wgrad(unit, action, worker))
                elif op is Op.N:
                    self.normed.add((worker, action.version))
                elif op is Op.F and action.stage in tied:
                    self.version_at[action.stage, action.replica, action.mb] = action.version

    def _rings(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each (unit, round), the contributing workers in microbatch order; a ring sums along them."""
        first: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for (worker, unit, round_), values in self.wgrads.items():
            first[unit, round_][worker] = min(value.mb for value in values)
        return {key: tuple(sorted(workers, key=workers.__getitem__)) for key, workers in first.items()}

    def of(self, worker: int, entry: Entry) -> Effects:
        """Returns what an entry reads and writes on this worker."""
        if isinstance(entry, Action):
            return self._action(worker, entry)
        if isinstance(entry, Transfer):
            return Effects((entry.value,), ()) if entry.sends else Effects((), (entry.value,))
        first, second = (self._action(worker, action) for action in entry)
        return Effects(first.reads + second.reads, first.writes + second.writes)

    def _action(self, worker: int, action: Action) -> Effects:
        match action.op:
            case Op.F:
                found = self._forward(worker, action)
            case Op.B | Op.I:
                found = self._backward(worker, action)
            case Op.W:
                reads = (_own(Kind.REST, action, worker), *self._params(worker, action))
                found = Effects(reads, self._wgrads(worker, action))
            case Op.R:
                reads = (_own(Kind.KEPT, action, worker), *self._params(worker, action))
                found = Effects(reads, (_own(Kind.SAVED, action, worker),))
            case Op.S:
                found = self._sync(worker, action)
            case Op.N:
                sums = [_sum(self.schedule, unit, action.version, worker) for unit in self._units_held(worker)]
                found = Effects(tuple(sums), (Value(Kind.NORM, 0, version=action.version, piece=worker),))
            case Op.U:
                found = self._update(worker, action)
            case Op.G:
                raise MeshwrightError(f"{action}: nothing to gather, this schedule does not shard its parameters")
        if not self.writes_turn and not self.reads_turn:
            return found
        return Effects(
            found.reads + tuple(self.reads_turn.get(action, ())), found.writes + tuple(self.writes_turn.get(action, ()))
        )

    def _forward(self, worker: int, action: Action) -> Effects:
        stage = action.stage
        reads = self._crossing(Kind.ACT, action, stage - 1, worker, outward=False) if stage > 0 else ()
        writes = self._crossing(Kind.ACT, action, stage, worker, outward=True) if stage < self.last else ()
        if self.schedule.forward_only:
            return Effects(reads + self._params(worker, action), writes)
        kind = Kind.KEPT if self.recompute and self.recompute[stage].share > 0 else Kind.SAVED
        saved = _own(kind, action, worker)
        if action.part == NONE and self.halves:
            return Effects(reads + self._params(worker, action), (*writes, *(saved._replace(part=half) for half in self.halves)))
        return Effects(reads + self._params(worker, action), (*writes, saved))

    def _backward(self, worker: int, action: Action) -> Effects:
        stage = action.stage
        reads = self._crossing(Kind.GRAD, action, stage, worker, outward=False) if stage < self.last else ()
        writes = self._crossing(Kind.GRAD, action, stage - 1, worker, outward=True) if stage > 0 else ()
        inline = self.recompute and self.recompute[stage].share > 0 and not self.recompute[stage].early
        saved = _own(Kind.KEPT if inline else Kind.SAVED, action, worker)
        left = self._wgrads(worker, action) if action.op is Op.B else (_own(Kind.REST, action, worker),)
        return Effects((*reads, saved, *self._params(worker, action)), writes + left)

    def _sync(self, worker: int, action: Action) -> Effects:
        unit, round_ = action.stage, action.version
        reads = tuple(self.wgrads.get((worker, unit, round_), ()))
        if not self.schedule.ring:
            return Effects(reads, (_sum(self.schedule, unit, round_, worker),))
        ring = self.rings.get((unit, round_), ())
        place = ring.index(worker) if worker in ring else 0
        if place > 0:
            reads += (Value(Kind.PARTIAL, unit, version=round_, piece=ring[place - 1]),)
        if place == len(ring) - 1:
            return Effects(reads, (_sum(self.schedule, unit, round_, worker),))
        return Effects(reads, (Value(Kind.PARTIAL, unit, version=round_, piece=worker),))

    def _update(self, worker: int, action: Action) -> Effects:
        unit, k = action.stage, action.version
        reads = [_sum(self.schedule, unit, k, worker), _param(unit, k, worker), _opt(unit, k, worker)]
        if (worker, k) in self.normed:
            reads.append(Value(Kind.NORM, 0, version=k, piece=worker))
        return Effects(tuple(reads), (_param(unit, k + 1, worker), _opt(unit, k + 1, worker)))

    def _crossing(self, kind: Kind, action: Action, boundary: int, worker: int, *, outward: bool) -> tuple[Value, ...]:
        """Returns the pieces of act or grad that this worker sends or needs at the boundary after stage `boundary`."""
        mb, replica = action.mb, action.replica
        if self.narrow:
            return (Value(kind, boundary, mb, replica, 0, action.part),)
        placement = self.schedule.placement
        before, after = placement.team(replica, boundary, mb), placement.team(replica, boundary + 1, mb)
        here = 1 if (kind is Kind.ACT) == outward else 2
        crossing = placement.pieces(before, after)
        return tuple(Value(kind, boundary, mb, replica, 0, action.part, p[0]) for p in crossing if p[here] == worker)

    def _params(self, worker: int, action: Action) -> tuple[Value, ...]:
        if not self.schedule.ties:  # the same for all microbatches, so it is cached
            key = (worker, action.stage, action.version)
            return self.params.get(key) or self.params.setdefault(key, (_param(action.stage, action.version, worker),))
        found = [_param(action.stage, action.version, worker)]
        for unit in self.schedule.units_of[action.stage][1:]:
            first = self.schedule.stages_of(unit)[0]
            version = self.version_at.get((first, action.replica, action.mb), action.version)
            found.append(_param(unit, version, worker))
        return tuple(found)

    def _wgrads(self, worker: int, action: Action) -> tuple[Value, ...]:
        return tuple([_wgrad(unit, action, worker) for unit in self.schedule.units_of[action.stage]])

    def _units_held(self, worker: int) -> list[int]:
        return [unit for unit, workers in enumerate(self.schedule.holders) if worker in workers]


def initial(schedule: Schedule, worker: int) -> tuple[Value, ...]:
    """Returns what a worker holds before its list starts: version 0 of its parameters and their optimizer state."""
    units = [unit for unit, workers in enumerate(schedule.holders) if worker in workers]
    return tuple(value for unit in units for value in (_param(unit, 0, worker), _opt(unit, 0, worker)))


def collective(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Returns the workers that must issue this action together; empty if a worker runs it alone."""
    if action.op is Op.S and not schedule.ring:
        return schedule.holders[action.stage]
    return tuple(range(schedule.workers)) if action.op is Op.N else ()


def _own(kind: Kind, action: Action, worker: int) -> Value:
    return Value(kind, action.stage, action.mb, action.replica, 0, action.part, worker)


def _wgrad(unit: int, action: Action, worker: int) -> Value:
    """The gradient that one backward adds to a unit. It names the stage, because each stage of a tied unit adds one."""
    return Value(Kind.WGRAD, unit, action.mb, action.replica, action.stage, action.part, worker)


def _param(unit: int, version: int, worker: int) -> Value:
    return Value(Kind.PARAM, unit, NONE, 0, version, NONE, worker)


def _opt(unit: int, version: int, worker: int) -> Value:
    return Value(Kind.OPT, unit, NONE, 0, version, NONE, worker)


def _sum(schedule: Schedule, unit: int, round_: int, worker: int) -> Value:
    """The sum of a unit. A collective leaves one on each member; a ring makes one and passes it on."""
    return Value(Kind.SUM, unit, version=round_, piece=NONE if schedule.ring else worker)


def _turn(reader: Action) -> Value:
    """A turn is named after the action that waits for it."""
    return Value(Kind.TURN, reader.stage, reader.mb, reader.replica, 0, reader.part, list(Op).index(reader.op))
