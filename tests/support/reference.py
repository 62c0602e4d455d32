"""A second simulator that shares no code with the first: what both must agree on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple, TypeGuard

from meshwright import (
    Action,
    Cell,
    Cluster,
    Duplex,
    Op,
    Recompute,
    Schedule,
    StageCost,
    Timeline,
    Transfer,
    Value,
    lower,
    simulate,
)
from meshwright.ir.action import Entry, Kind, actions
from tests.support.random_schedules import Case, row_count, rows_of

CLOSE = 1e-9
Times = dict[tuple[int, Entry], tuple[float, float]]


class Event(NamedTuple):
    """What a node may wait for: another node is done, or is off its link."""

    node: Hashable
    off: bool = False


class Reference:
    """Lowered lists run by events on a heap, with its own reading of who waits for whom and of what everything costs.

    A node is a compute entry of a worker, a message or a collective. It starts at the last of the events it waits for.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster | None, overlap: float = 0.0) -> None:
        self.schedule, self.costs, self.overlap = schedule, costs, overlap
        self.cluster = cluster or Cluster()
        self.waits: dict[Hashable, set[Event]] = {}
        self.takes: dict[Hashable, tuple[float, float]] = {}
        self.places: dict[tuple[int, Entry], Hashable] = {}
        for worker in range(schedule.workers):
            self._walk(worker)
        for worker in range(schedule.workers):
            self._queue(worker)

    def run(self) -> Times:
        """Start and end of every entry on every worker."""
        left = {node: len(events) for node, events in self.waits.items()}
        heard: dict[Event, list[Hashable]] = defaultdict(list)
        for node, events in self.waits.items():
            for event in events:
                heard[event].append(node)
        times: dict[Hashable, tuple[float, float]] = {}
        heap: list[tuple[float, int, Event]] = []

        def start(node: Hashable, now: float) -> None:
            busy, latency = self.takes[node]
            times[node] = (now, now + busy + latency)
            heappush(heap, (now + busy, 2 * len(times), Event(node, off=True)))
            heappush(heap, (now + busy + latency, 2 * len(times) + 1, Event(node)))

        for node in [node for node, count in left.items() if not count]:
            start(node, 0.0)
        while heap:
            now, _, event = heappop(heap)
            for node in heard[event]:
                left[node] -= 1
                if not left[node]:
                    start(node, now)
        assert len(times) == len(self.waits), "something never starts"
        return {place: times[node] for place, node in self.places.items()}

    def _walk(self, worker: int) -> None:
        """One list: computes in a row, collectives in a row, messages behind the computes before them."""
        compute: Hashable = None
        joint: Hashable = None
        came: dict[Hashable, list[Hashable]] = defaultdict(list)
        brought: dict[Value, Hashable] = {}
        for entry in self.schedule.lists[worker]:
            if isinstance(entry, Transfer):
                node = _message(worker, entry)
                if entry.sends:
                    self._node(node, self._message_s(*node), compute, brought.get(entry.value))
                else:
                    brought[entry.value] = node
                    for reader in _readers(entry.value):
                        came[reader].append(node)
            elif self._joint(entry):
                node = entry
                self._node(node, (self._sync_s(entry), 0.0), compute, joint, *came[key_of(entry)])
                joint = node
                came[(Op.U, entry.version) if entry.op is Op.N else (Op.U, entry.stage, entry.version)].append(node)
            else:
                node = (worker, entry)
                arrived = [n for action in actions(entry) for n in came[key_of(action)]]
                if isinstance(entry, Action) and entry.op is Op.U:
                    arrived += came[Op.U, entry.version]
                self._node(node, (self._entry_s(worker, entry), 0.0), compute, *arrived)
                compute = node
            self.places[worker, entry] = node

    def _queue(self, worker: int) -> None:
        """Messages take their link in list order; both directions in one row where it is half duplex."""
        half = self.cluster.duplex is Duplex.HALF
        before: dict[int, Hashable] = {}
        for entry in self.schedule.lists[worker]:
            if isinstance(entry, Transfer) and (worker < entry.peer if half else entry.sends):
                node = _message(worker, entry)
                if entry.peer in before:
                    self.waits[node].add(Event(before[entry.peer], off=True))
                before[entry.peer] = node

    def _node(self, node: Hashable, takes: tuple[float, float], *others: Hashable) -> None:
        self.takes[node] = takes
        self.waits.setdefault(node, set()).update(Event(other) for other in others if other is not None)

    def _joint(self, entry: Entry) -> TypeGuard[Action]:
        return isinstance(entry, Action) and (entry.op is Op.N or (entry.op is Op.S and not self.schedule.ring))

    def _sync_s(self, action: Action) -> float:
        return self.costs[action.stage].sync_s if action.op is Op.S and action.stage < len(self.costs) else 0.0

    def _entry_s(self, worker: int, entry: Action | Cell) -> float:
        if isinstance(entry, Cell):
            one, two = (self._entry_s(worker, action) for action in entry)
            return one + two - self.overlap * min(one, two)
        if entry.op in (Op.S, Op.U):
            return 0.0
        cost = self.costs[entry.stage]
        how = self.schedule.recompute[entry.stage] if self.schedule.recompute else Recompute(0.0)
        inside = how.share * cost.recompute_s if not how.early else 0.0
        whole = {
            Op.F: cost.forward_s,
            Op.R: how.share * cost.recompute_s,
            Op.I: cost.input_s + inside,
            Op.W: cost.weight_s,
            Op.B: cost.input_s + inside + cost.weight_s,
        }
        placement = self.schedule.placement
        rows = rows_of(placement, placement.team(entry.replica, entry.stage, entry.mb), worker)
        return whole[entry.op] * len(rows) / row_count(placement) / (1 if entry.part < 0 else self.schedule.parts)

    def _message_s(self, value: Value, source: int, target: int) -> tuple[float, float]:
        link, size = self.cluster.between(source, target), 0.0
        if value.kind in (Kind.ACT, Kind.GRAD):
            cost, placement = self.costs[value.stage], self.schedule.placement
            here, there = (source, target) if value.kind is Kind.ACT else (target, source)
            before, behind = (placement.team(value.replica, value.stage + k, value.mb) for k in (0, 1))
            rows = rows_of(placement, before, here) & rows_of(placement, behind, there)
            size = (cost.output_bytes if value.kind is Kind.ACT else cost.gradient_bytes) * len(rows) / row_count(placement)
            size /= 1 if value.part < 0 else self.schedule.parts
        elif value.kind in (Kind.PARTIAL, Kind.SUM) and value.stage < len(self.costs):
            size = self.costs[value.stage].parameter_bytes
        return size / link.bytes_per_s, link.latency_s


def _message(worker: int, entry: Transfer) -> tuple[Value, int, int]:
    return (entry.value, worker, entry.peer) if entry.sends else (entry.value, entry.peer, worker)


def key_of(action: Action) -> Hashable:
    """How a reader is found from what it reads: without the parameter version, which no message carries."""
    if action.op is Op.N:
        return Op.N, action.version
    if action.op in (Op.S, Op.U):
        return action.op, action.stage, action.version
    return action.op, action.stage, action.mb, action.replica, action.part


def _readers(value: Value) -> list[Hashable]:
    """Who reads a value that arrives."""
    same = (value.mb, value.replica, value.part)
    match value.kind:
        case Kind.ACT:
            return [(Op.F, value.stage + 1, *same)]
        case Kind.GRAD:
            return [(op, value.stage, *same) for op in (Op.B, Op.I)]
        case Kind.TURN:
            return [(list(Op)[value.piece], value.stage, *same)]
        case Kind.PARTIAL:
            return [(Op.S, value.stage, value.version)]
        case Kind.SUM:
            return [(Op.U, value.stage, value.version), (Op.N, value.version)]
    raise AssertionError(f"{value} does not travel")


def spans(timeline: Timeline) -> Times:
    """A timeline's spans by worker and entry; no entry comes twice."""
    found = {(span.worker, span.entry): (span.start_s, span.end_s) for span in timeline.spans}
    assert len(found) == len(timeline.spans)
    return found


def agree(mine: Times, theirs: Times) -> None:
    """The same spans at the same times."""
    assert mine.keys() == theirs.keys()
    for place, (start, end) in mine.items():
        first, last = theirs[place]
        assert abs(start - first) <= CLOSE and abs(end - last) <= CLOSE, (place, (start, end), (first, last))


def compare(case: Case) -> Timeline:
    """Simulate a case both ways and compare; the timeline has the times of the lowered lists, and keeps its bound."""
    lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster)
    timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
    agree(Reference(lowered, case.costs, case.cluster, case.overlap).run(), spans(timeline))
    assert timeline.makespan_s >= timeline.lower_bound_s - CLOSE
    return timeline


def seeded(block: int, size: int) -> Iterator[Random]:
    """The random sources of one block of seeds."""
    return (Random(f"{block}:{number}") for number in range(size))
