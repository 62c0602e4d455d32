"""The dependency rule, in one place: what every entry reads, writes and consumes.

Checker, communication, simulator, memory curve and executor all use this file only.

    F   reads act of the previous stage, its parameters    writes act, and saved (kept if the stage recomputes);
                                                           forward-only schedules save nothing
    R   reads kept                                         writes saved
    B   reads grad of the next stage, saved (or kept)      writes grad and wgrad
    I   reads the same                                     writes grad and rest; W turns rest into wgrad
    S   reads every wgrad of its round on this worker      writes sum (in a ring: partial, the last one sum)
        (where gradients are sharded there is one S for each gradient, which reads that one)
    N   reads the sums                                     writes norm
    U   reads sum, norm, param of version k                writes param of version k + 1, or its slice if state is sharded
    G   reads the slice, param of version k                writes param of version k + 1
        (where parameters are sharded, G counts its uses: it reads the slice of version k and writes a param of version k for
        the actions up to the next G of the unit)

If a unit has an owner, its param is two values, which only the owner writes: one for forwards and one for backwards.

Reading an act, grad, saved, kept, rest, wgrad, partial or turn consumes it. Parameters, sums and norms are not consumed:
they live as long as a later entry of the worker's list reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.ir.action import COMPUTE, NONE, Action, Entry, Kind, Op, Transfer, Value, walk
from meshwright.ir.analysis.named_values import held, one_sum, opt, own, param, shard, sum_of, token, turn, wgrad
from meshwright.ir.schedule import Schedule, Sharding

CONSUMED = frozenset({Kind.ACT, Kind.GRAD, Kind.SAVED, Kind.KEPT, Kind.REST, Kind.WGRAD, Kind.PARTIAL, Kind.TURN})
"""Kinds that are consumed by their reader."""

ACTIVATIONS = frozenset({Kind.SAVED, Kind.KEPT, Kind.REST})
"""Kinds that hold the activations of one stage and one microbatch."""


class Effects(NamedTuple):
    """The values that an entry needs before it starts, and those that exist when it ends."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


def effects(schedule: Schedule, worker: int, entry: Entry) -> Effects:
    """Return the values that an entry of a schedule reads and writes. This is the dependency rule.

    Args:
        schedule: The schedule that contains the entry.
        worker: The worker whose list contains it.
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
        self.narrow = schedule.placement.single
        self.halves = () if schedule.parts == 1 else tuple(range(schedule.parts))
        self.recompute = schedule.recompute or ()
        self.writes_turn: dict[Action, list[Value]] = defaultdict(list)
        self.reads_turn: dict[Action, list[Value]] = defaultdict(list)
        for writer, reader in schedule.turn_edges:
            self.writes_turn[writer].append(turn(reader))
            self.reads_turn[reader].append(turn(reader))
        self.wgrads: dict[tuple[int, int, int], list[Value]] = defaultdict(list)
        self.gathered: dict[tuple[int, Action], dict[int, int]] = {}
        self.sums: dict[tuple[int, int, int], list[Value]] = defaultdict(list)
        self.normed: set[tuple[int, int]] = set()
        self.params: dict[tuple[int, int, int, bool], tuple[Value, ...]] = {}
        self.version_at: dict[tuple[int, int, int], int] = {}
        self._scan()
        self.rings: dict[tuple[int, int], tuple[int, ...]] = self._rings() if schedule.ring else {}

    def _scan(self) -> None:
        """Collects the weight gradients of each worker and round, the rounds with a norm, and the versions that ties read."""
        schedule = self.schedule
        tied = {stages[0] for stages in schedule.ties}
        units_of, microbatches = schedule.units_of, schedule.microbatches
        sharded = schedule.sharding is Sharding.PARAMETERS
        for worker, entries in enumerate(schedule.lists):
            newest: dict[int, int] = {}
            for action in walk(entries):
                op = action.op
                if sharded and op is Op.G:
                    newest[action.stage] = action.mb
                elif sharded and op in COMPUTE:
                    self.gathered[worker, action] = {unit: newest.get(unit, NONE) for unit in units_of[action.stage]}
                if op is Op.B or op is Op.W:
                    for unit in units_of[action.stage]:
                        self.wgrads[worker, unit, action.mb // microbatches].append(wgrad(unit, action, worker))
                elif op is Op.S and action.mb != NONE:
                    self.sums[worker, action.stage, action.version].append(one_sum(action, worker))
                elif op is Op.N:
                    self.normed.add((worker, action.version))
                elif op is Op.F and action.stage in tied:
                    self.version_at[action.stage, action.replica, action.mb] = action.version

    def _rings(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each (unit, round), the contributing workers in the order of their last gradients; a ring sums along it.

        A worker adds all its gradients of a round at once. In a steady pipeline, B of microbatch m on stage j ends at 2m - j.
        """
        last: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        for (worker, unit, round_), values in self.wgrads.items():
            last[unit, round_][worker] = max((2 * value.mb - value.version, -value.version) for value in values)
        return {key: tuple(sorted(workers, key=workers.__getitem__)) for key, workers in last.items()}

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
                reads = (own(Kind.REST, action, worker), *self._params(worker, action))
                found = Effects(reads, self._wgrads(worker, action))
            case Op.R:
                reads = (own(Kind.KEPT, action, worker), *self._params(worker, action))
                found = Effects(reads, (own(Kind.SAVED, action, worker),))
            case Op.S:
                found = self._sync(worker, action)
            case Op.N:
                sums = [value for unit in self._units_held(worker) for value in self._sums(worker, unit, action.version)]
                found = Effects(tuple(sums), (Value(Kind.NORM, 0, version=action.version, piece=worker),))
            case Op.U:
                found = self._update(worker, action)
            case Op.G:
                found = self._gather(worker, action)
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
        saved = own(kind, action, worker)
        if action.part == NONE and self.halves:
            return Effects(reads + self._params(worker, action), (*writes, *(saved._replace(part=half) for half in self.halves)))
        return Effects(reads + self._params(worker, action), (*writes, saved))

    def _backward(self, worker: int, action: Action) -> Effects:
        stage = action.stage
        reads = self._crossing(Kind.GRAD, action, stage, worker, outward=False) if stage < self.last else ()
        writes = self._crossing(Kind.GRAD, action, stage - 1, worker, outward=True) if stage > 0 else ()
        inline = self.recompute and self.recompute[stage].share > 0 and not self.recompute[stage].early
        saved = own(Kind.KEPT if inline else Kind.SAVED, action, worker)
        left = self._wgrads(worker, action) if action.op is Op.B else (own(Kind.REST, action, worker),)
        return Effects((*reads, saved, *self._params(worker, action)), writes + left)

    def _sync(self, worker: int, action: Action) -> Effects:
        unit, round_ = action.stage, action.version
        reads = tuple(self.wgrads.get((worker, unit, round_), ()))
        if action.mb != NONE:
            place = action.mb - round_ * self.schedule.microbatches
            return Effects(reads[place : place + 1] if place >= 0 else (), (one_sum(action, worker),))
        if not self.schedule.ring:
            return Effects(reads, (sum_of(self.schedule, unit, round_, worker),))
        ring = self.rings.get((unit, round_), ())
        place = ring.index(worker) if worker in ring else 0
        if place > 0:
            reads += (Value(Kind.PARTIAL, unit, version=round_, piece=ring[place - 1]),)
        if place == len(ring) - 1:
            return Effects(reads, (sum_of(self.schedule, unit, round_, worker),))
        return Effects(reads, (Value(Kind.PARTIAL, unit, version=round_, piece=worker),))

    def _update(self, worker: int, action: Action) -> Effects:
        unit, k = action.stage, action.version
        reads = [*self._sums(worker, unit, k), held(self.schedule, unit, k, worker)[0], opt(unit, k, worker)]
        if (worker, k) in self.normed:
            reads.append(Value(Kind.NORM, 0, version=k, piece=worker))
        if self.schedule.sharding is not Sharding.NONE:
            return Effects(tuple(reads), (shard(unit, k + 1, worker), opt(unit, k + 1, worker)))
        return Effects(tuple(reads), (*held(self.schedule, unit, k + 1, worker), opt(unit, k + 1, worker)))

    def _sums(self, worker: int, unit: int, round_: int) -> list[Value]:
        """Returns the sums that an update reads: one, or one for each gradient."""
        return self.sums.get((worker, unit, round_)) or [sum_of(self.schedule, unit, round_, worker)]

    def _gather(self, worker: int, action: Action) -> Effects:
        if self.schedule.sharding is Sharding.NONE:
            raise MeshwrightError(f"{action}: nothing to gather, this schedule does not shard its parameters")
        unit, k = action.stage, action.version
        if self.schedule.sharding is Sharding.PARAMETERS:
            return Effects((shard(unit, k, worker),), (param(unit, k, worker)._replace(mb=action.mb),))
        return Effects((shard(unit, k + 1, worker), param(unit, k, worker)), (param(unit, k + 1, worker),))

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
        if self.gathered and (found_gathers := self.gathered.get((worker, action))) is not None:
            return self._gathered_params(worker, action, found_gathers)
        if not self.schedule.ties:  # the same for all microbatches, so it is cached
            key = (worker, action.stage, action.version, action.op is Op.F)
            return self.params.get(key) or self.params.setdefault(key, (self._param(worker, action, *key[1:3]),))
        found = [self._param(worker, action, action.stage, action.version)]
        for unit in self.schedule.units_of[action.stage][1:]:
            first = self.schedule.stages_of(unit)[0]
            version = self.version_at.get((first, action.replica, action.mb), action.version)
            found.append(self._param(worker, action, unit, version))
        return tuple(found)

    def _param(self, worker: int, action: Action, unit: int, version: int) -> Value:
        return token(unit, version, action.op) if self.schedule.owners else param(unit, version, worker)

    def _gathered_params(self, worker: int, action: Action, gathers: dict[int, int]) -> tuple[Value, ...]:
        return tuple(param(unit, action.version, worker)._replace(mb=number) for unit, number in gathers.items())

    def _wgrads(self, worker: int, action: Action) -> tuple[Value, ...]:
        return tuple([wgrad(unit, action, worker) for unit in self.schedule.units_of[action.stage]])

    def _units_held(self, worker: int) -> list[int]:
        return [unit for unit, workers in enumerate(self.schedule.holders) if worker in workers]


def collective(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Returns the workers that must issue this action together; empty if a worker runs it alone."""
    if action.op is Op.G or (action.op is Op.S and not schedule.ring):
        return schedule.holders[action.stage]
    return tuple(range(schedule.workers)) if action.op is Op.N else ()
