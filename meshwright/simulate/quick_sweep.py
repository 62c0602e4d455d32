"""Times of a schedule straight from its unlowered lists: what a search over many plans needs, and nothing more.

    program = QuickProgram(schedule)
    program.makespan_s(costs, cluster)      the same as simulate(schedule, costs, cluster).makespan_s

With `as_run` messages are placed where a run places them, which does not know the links: the time of `proved_with_peaks`.
It places syncs as `passes/sync.py` does (lazy or eager), orders messages as `passes/messages.py` does, and sweeps once. Laws in
`tests/simulate/test_quick_sweep.py` hold it equal to the engine on every schedule. What it cannot treat goes to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.passes.lower import lower
from meshwright.passes.sync import Sync
from meshwright.simulate import quick_kernels as kernels
from meshwright.simulate.quick_program import Ints, QuickLists, joined, quick_lists
from meshwright.simulate.quick_syncs import PlacedRows, follows_times, list_positions, placed_rows
from meshwright.simulate.quick_wires import QuickWires
from meshwright.simulate.simulator import simulate

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class QuickTimes:
    """How long a step takes, and until when each worker computes."""

    makespan_s: float
    computed_s: tuple[float, ...]


class QuickProgram:
    """A schedule as arrays, for costs that change."""

    def __init__(self, schedule: Schedule, *, sync: Sync | str = Sync.EAGER, as_run: bool = False) -> None:
        self.schedule, self.as_run = schedule, as_run
        self.sync = Sync(sync)
        self.lists: QuickLists | None = quick_lists(schedule) if self.sync in (Sync.EAGER, Sync.LAZY) else None

    @cached_property
    def placed(self) -> PlacedRows | None:
        """The lists with syncs; None if their places depend on times."""
        if self.lists is None or follows_times(self.schedule, self.sync):
            return None
        return placed_rows(self.lists, self.schedule, self.sync, list_positions(self.lists))

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
            schedule = lower(self.schedule, sync=self.sync, costs=costs) if self.as_run else self.schedule
            timeline = simulate(schedule, costs, cluster, sync=self.sync, overlap=overlap)
            ends = tuple(spans[-1].end_s if spans else 0.0 for spans in timeline.compute)
            return QuickTimes(timeline.makespan_s, ends)
        return _Sweep(self, self.lists, settled(self.schedule, costs), costs, cluster, overlap).run()


def settled(schedule: Schedule, costs: Sequence[StageCost]) -> Schedule:
    """Returns the schedule with recompute inside the backward where costs say so, as lowering does."""
    if schedule.recompute is None and any(cost.recompute_s > 0 for cost in costs):
        return replace(schedule, recompute=tuple(Recompute(1.0 if cost.recompute_s > 0 else 0.0) for cost in costs))
    return schedule


class _Sweep:
    def __init__(
        self,
        program: QuickProgram,
        lists: QuickLists,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster,
        overlap: float,
    ) -> None:
        self.program, self.lists, self.schedule, self.cluster = program, lists, schedule, cluster
        self.price = Price(schedule, costs, cluster)
        self.count = len(lists.slots) * lists.microbatches
        self.plain = np.array([self.price.entry_s(worker, entry) for worker, entry in lists.examples])
        self.final = self.plain
        if overlap:
            hidden = Price(schedule, costs, cluster, overlap=overlap)
            self.final = np.array([hidden.entry_s(worker, entry) for worker, entry in lists.examples])
        self.wires = QuickWires(lists, schedule, self.price, cluster)
        self.free = cluster.free or program.as_run

    def run(self) -> QuickTimes:
        """Places syncs, orders all entries, and sweeps."""
        rows = self._placed()
        alone = self._durations(rows)
        workers, each = self.schedule.workers, self.lists.microbatches
        first, list_of, duration, reads, writes, event = self._with_channels(rows, alone)
        delay = np.where((self.wires.source == self.wires.target) | self.free, 0.0, self.wires.busy + self.wires.latency)
        members = np.array([len(event) for event in rows.members], np.int64)
        late = np.zeros_like(self.wires.latency) if self.free else self.wires.latency
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
        final = np.where(rows.classes >= 0, self.final[np.maximum(rows.classes, 0)], alone)
        final = np.concatenate([final, np.zeros(len(list_of) - len(final))])
        kind = np.concatenate([rows.kind, np.zeros(len(list_of) - len(rows.kind), np.int64)])
        first_member, member = joined([np.array(event, np.int64) for event in rows.members])
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
            simulate(self.schedule, self.price.costs, self.cluster, sync=self.program.sync)  # raises and says what waits for what
        found: Ints = ran[np.argsort(key, kind="stable")]
        return found

    def _with_channels(self, rows: PlacedRows, duration: Floats) -> tuple[Ints, Ints, Floats, Ints, Ints, Ints]:
        """Adds one more list for each channel with an order of its own, and lets readers wait for what it brings."""
        each, count = self.lists.microbatches, self.count
        first, reads, writes, event = rows.first, rows.reads, rows.writes, rows.event
        list_of = np.repeat(np.arange(len(first) - 1), np.diff(first))
        if self.wires.channels:
            slot = np.maximum(reads, 0) // each
            reads = np.where((reads >= 0) & self.wires.carried[slot], reads + count, reads)
            first = np.concatenate([first, first[-1] + np.cumsum([len(values) for values in self.wires.channels])])
            values = np.concatenate(self.wires.channels)
            none = np.full(len(values), -1, np.int64)
            channels = [np.full(len(v), len(rows.first) - 1 + n) for n, v in enumerate(self.wires.channels)]
            list_of = np.concatenate([list_of, *channels])
            duration = np.concatenate([duration, np.where(self.free, 0.0, self.wires.busy[values // each])])
            reads = np.concatenate([reads, np.stack([values, none], axis=1)])
            writes = np.concatenate([writes, np.stack([values + count, none], axis=1)])
            event = np.concatenate([event, none])
        return first, list_of, duration, np.ascontiguousarray(reads), np.ascontiguousarray(writes), event

    def _placed(self) -> PlacedRows:
        """The lists with syncs, the reduction of the norm, updates and gathers."""
        program, first, classes, reads, writes = self.program, *self.lists.joined
        if program.placed is not None:
            return program.placed
        none = np.full(len(classes), -1, np.int64)
        zero = np.zeros_like(self.wires.latency)
        sequence = self._sequence(first, reads, writes, self.plain[classes], none, np.ones(1, np.int64), zero, zero)
        position = np.empty(len(sequence), np.int64)
        position[sequence] = np.arange(len(sequence))
        positions = [position[first[w] : first[w + 1]] for w in range(len(first) - 1)]
        return placed_rows(self.lists, self.schedule, program.sync, positions)

    def _durations(self, rows: PlacedRows) -> Floats:
        """How long each entry takes; for one that workers do together, once all of them are there."""
        together = np.zeros(len(rows.members))
        for event, unit in enumerate(rows.sums):
            together[event] = self.price.sync_s(unit)
        for event, unit in rows.gathers.items():
            together[event] = self.price.gather_s(unit)
        alone = np.where(rows.classes >= 0, self.plain[np.maximum(rows.classes, 0)], 0.0)
        return np.where(rows.event >= 0, together[np.maximum(rows.event, 0)], alone)
