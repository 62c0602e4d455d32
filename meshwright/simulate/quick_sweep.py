"""Times of a schedule straight from its unlowered lists: what a search over many plans needs, and nothing more.

    program = QuickProgram(schedule)
    program.makespan_s(costs, cluster)      the same as simulate(schedule, costs, cluster).makespan_s

It places syncs as `passes/sync.py` does (lazy or eager), orders messages as `passes/messages.py` does, and sweeps once. Laws in
`tests/simulate/test_quick_sweep.py` hold it equal to the engine on every schedule. What it cannot treat goes to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.action import NONE
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Recompute, Schedule, Sharding
from meshwright.ir.stage_cost import StageCost
from meshwright.passes.sync import Sync
from meshwright.simulate import quick_kernels as kernels
from meshwright.simulate.quick_program import Ints, QuickLists, joined, quick_lists
from meshwright.simulate.quick_wires import QuickWires
from meshwright.simulate.simulator import simulate

Floats = NDArray[np.float64]
COMPUTES, REDUCES, NORM, UPDATES = range(4)


@dataclass
class _Rows:
    """Entries of all lists, one after the other."""

    first: Ints
    classes: Ints  # -1 for a reduction, norm, update or gather
    reads: Ints
    writes: Ints
    duration: Floats
    event: Ints
    kind: Ints


@dataclass(frozen=True)
class QuickTimes:
    """How long a step takes, and until when each worker computes."""

    makespan_s: float
    computed_s: tuple[float, ...]


class QuickProgram:
    """A schedule as arrays, for costs that change."""

    def __init__(self, schedule: Schedule, *, sync: Sync | str = Sync.EAGER) -> None:
        self.schedule = schedule
        self.sync = Sync(sync)
        self.lists: QuickLists | None = quick_lists(schedule) if self.sync in (Sync.EAGER, Sync.LAZY) else None

    @property
    def quick(self) -> bool:
        """False if only the plain engine can run this schedule."""
        return self.lists is not None

    def makespan_s(self, costs: Sequence[StageCost], cluster: Cluster | None = None, *, overlap: float = 0.0) -> float:
        """Returns how long a step takes."""
        return self.times(costs, cluster, overlap=overlap).makespan_s

    def times(self, costs: Sequence[StageCost], cluster: Cluster | None = None, *, overlap: float = 0.0) -> QuickTimes:
        """Returns how long a step takes, and until when each worker computes."""
        cluster = cluster or Cluster()
        if self.lists is None:
            timeline = simulate(self.schedule, costs, cluster, sync=self.sync, overlap=overlap)
            ends = tuple(spans[-1].end_s if spans else 0.0 for spans in timeline.compute)
            return QuickTimes(timeline.makespan_s, ends)
        return _Sweep(self.lists, self.sync, settled(self.schedule, costs), costs, cluster, overlap).run()


def settled(schedule: Schedule, costs: Sequence[StageCost]) -> Schedule:
    """Returns the schedule with recompute inside the backward where costs say so, as lowering does."""
    if schedule.recompute is None and any(cost.recompute_s > 0 for cost in costs):
        return replace(schedule, recompute=tuple(Recompute(1.0 if cost.recompute_s > 0 else 0.0) for cost in costs))
    return schedule


class _Sweep:
    def __init__(
        self,
        lists: QuickLists,
        sync: Sync,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster,
        overlap: float,
    ) -> None:
        self.lists, self.sync, self.schedule, self.cluster = lists, sync, schedule, cluster
        self.price = Price(schedule, costs, cluster)
        self.count = len(lists.slots) * lists.microbatches
        self.plain = np.array([self.price.entry_s(worker, entry) for worker, entry in lists.examples])
        self.final = self.plain
        if overlap:
            hidden = Price(schedule, costs, cluster, overlap=overlap)
            self.final = np.array([hidden.entry_s(worker, entry) for worker, entry in lists.examples])
        self.wires = QuickWires(lists, schedule, self.price, cluster)
        self.events: list[tuple[int, ...]] = []

    def run(self) -> QuickTimes:
        """Places syncs, orders all entries, and sweeps."""
        rows = self._with_syncs()
        workers, each = self.schedule.workers, self.lists.microbatches
        first, list_of, duration, reads, writes, event = self._with_channels(rows)
        free = self.cluster.free
        delay = np.where((self.wires.source == self.wires.target) | free, 0.0, self.wires.busy + self.wires.latency)
        members = np.array([len(event) for event in self.events] or [1], np.int64)
        late = np.zeros_like(self.wires.latency) if free else self.wires.latency
        sequence = self._sequence(first, reads, writes, duration, event, members, delay, late)
        head, after = kernels.messages(
            sequence,
            list_of,
            reads,
            writes,
            self.wires.source,
            self.wires.target,
            self.wires.line,
            self.wires.carried,
            self.wires.lanes,
            workers,
            each,
            self.count,
        )
        final = np.where(rows.classes >= 0, self.final[np.maximum(rows.classes, 0)], rows.duration)
        final = np.concatenate([final, np.zeros(len(list_of) - len(final))])
        kind = np.concatenate([rows.kind, np.zeros(len(list_of) - len(rows.kind), np.int64)])
        first_member, member = joined([np.array(event, np.int64) for event in self.events])
        last, worked = kernels.times(
            sequence,
            list_of,
            reads,
            kind,
            event,
            first_member,
            member,
            final,
            head,
            after,
            self.wires.source,
            self.wires.link,
            self.wires.busy,
            self.wires.latency,
            self.wires.links,
            workers,
            each,
            self.count,
            np.zeros(len(list_of)),
        )
        return QuickTimes(float(last), tuple(worked.tolist()))

    def _sequence(
        self, first: Ints, reads: Ints, writes: Ints, duration: Floats, event: Ints, members: Ints, delay: Floats, late: Floats
    ) -> Ints:
        workers, each = self.schedule.workers, self.lists.microbatches
        ran, key = kernels.order(first, reads, writes, duration, event, members, delay, late, workers, each, max(1, self.count))
        if len(ran) < len(duration):
            simulate(self.schedule, self.price.costs, self.cluster, sync=self.sync)  # raises and says what waits for what
        found: Ints = ran[np.argsort(key, kind="stable")]
        return found

    def _with_channels(self, rows: _Rows) -> tuple[Ints, Ints, Floats, Ints, Ints, Ints]:
        """Adds one more list for each channel with an order of its own, and lets readers wait for what it brings."""
        each, count = self.lists.microbatches, self.count
        first, duration, reads, writes, event = rows.first, rows.duration, rows.reads, rows.writes, rows.event
        list_of = np.repeat(np.arange(len(first) - 1), np.diff(first))
        if self.wires.channels:
            slot = np.maximum(reads, 0) // each
            reads = np.where((reads >= 0) & self.wires.carried[slot], reads + count, reads)
            first = np.concatenate([first, first[-1] + np.cumsum([len(values) for values in self.wires.channels])])
            values = np.concatenate(self.wires.channels)
            none = np.full(len(values), -1, np.int64)
            channels = [np.full(len(v), len(rows.first) - 1 + n) for n, v in enumerate(self.wires.channels)]
            list_of = np.concatenate([list_of, *channels])
            duration = np.concatenate([duration, self.wires.busy[values // each]])
            reads = np.concatenate([reads, np.stack([values, none], axis=1)])
            writes = np.concatenate([writes, np.stack([values + count, none], axis=1)])
            event = np.concatenate([event, none])
        return first, list_of, duration, np.ascontiguousarray(reads), np.ascontiguousarray(writes), event

    def _with_syncs(self) -> _Rows:
        """Adds syncs, the reduction of the norm, updates and gathers to the lists."""
        schedule = self.schedule
        insert = self._due()
        units = list(reversed(range(schedule.units)))
        norm = self._event(tuple(range(schedule.workers)))
        gathers: dict[int, int] = {}
        if schedule.sharding is not Sharding.NONE:
            gathers = {unit: self._event(schedule.holders[unit]) for unit in units}
        self.seconds = np.zeros(len(self.events))
        for number, unit in self.unit_of.items():
            self.seconds[number] = self.price.sync_s(unit)
        for unit, number in gathers.items():
            self.seconds[number] = self.price.gather_s(unit)
        first, classes, reads, writes = self.lists.joined
        added: list[tuple[int, int, int]] = []  # place in all lists, event, kind
        begins = [0]
        for worker in range(schedule.workers):
            start, end = int(first[worker]), int(first[worker + 1])
            added += [(start + place, event, REDUCES) for place, event in insert[worker]]
            added.append((end, norm, NORM))
            for unit in units:
                if worker in schedule.holders[unit]:
                    added += [(end, -1, UPDATES), *([(end, gathers[unit], REDUCES)] if gathers else [])]
            begins.append(end + len(added))
        places, events, kinds = (np.array(column, np.int64) for column in zip(*added, strict=True))
        none = np.full(len(classes), -1, np.int64)
        classes, event = np.insert(classes, places, -1), np.insert(none, places, events)
        kind = np.insert(np.full(len(none), COMPUTES, np.int64), places, kinds)
        duration = np.where(classes >= 0, self.plain[np.maximum(classes, 0)], 0.0)
        duration = np.where(event >= 0, self.seconds[np.maximum(event, 0)], duration)
        reads, writes = np.insert(reads, places, -1, axis=0), np.insert(writes, places, -1, axis=0)
        return _Rows(np.array(begins, np.int64), classes, reads, writes, duration, event, kind)

    def _event(self, members: tuple[int, ...]) -> int:
        self.events.append(members)
        return len(self.events) - 1

    def _due(self) -> list[list[tuple[int, int]]]:
        """For each worker the syncs of its list, as (place, event)."""
        schedule, lists = self.schedule, self.lists
        shared = any(len(workers) > 1 for workers in schedule.holders)
        singly = schedule.sharding.sums_singly
        positions = self._positions(shared and (self.sync is not Sync.LAZY or singly))
        found: list[tuple[int, int, int, int]] = []  # moment, rank among those of one moment, unit, number of a gradient
        late = sum(map(len, lists.classes))
        for unit in reversed(range(schedule.units)):
            ready = {w: lists.last_gradients[w][unit] for w in schedule.runners[unit] if unit in lists.last_gradients[w]}
            if not ready:
                continue
            if singly:
                longest = max(map(len, ready.values()))
                for k in range(longest):
                    moment = max(int(positions[w][of[k]]) for w, of in ready.items() if k < len(of))
                    found.append((moment, len(found), unit, k))
            else:
                moment = late if self.sync is Sync.LAZY else max(int(positions[w][of[-1]]) for w, of in ready.items())
                found.append((moment, len(found), unit, NONE))
        insert: list[list[tuple[int, int]]] = [[] for _ in lists.classes]
        self.unit_of: dict[int, int] = {}
        for moment, _, unit, _ in sorted(found):
            event = self._event(schedule.holders[unit])
            self.unit_of[event] = unit
            for member in schedule.holders[unit]:
                insert[member].append((int(np.searchsorted(positions[member], moment, side="right")), event))
        return insert

    def _positions(self, swept: bool) -> list[Ints]:
        """The positions of each list's entries in a linear order: list after list, or by a sweep without delays."""
        first, classes, reads, writes = self.lists.joined
        workers = range(len(first) - 1)
        if not swept:
            return [np.arange(first[w], first[w + 1]) for w in workers]
        none = np.full(len(classes), -1, np.int64)
        zero = np.zeros_like(self.wires.latency)
        sequence = self._sequence(first, reads, writes, self.plain[classes], none, np.ones(1, np.int64), zero, zero)
        position = np.empty(len(sequence), np.int64)
        position[sequence] = np.arange(len(sequence))
        return [position[first[w] : first[w + 1]] for w in workers]
