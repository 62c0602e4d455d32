"""The simulator against a second one that shares no code with it, a bound that no order beats, and laws of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, replace
from heapq import heappop, heappush
from itertools import pairwise, permutations, product
from random import Random
from typing import NamedTuple, TypeGuard

import pytest
from hypothesis import given, settings

from meshwright import (
    Action,
    Cell,
    Cluster,
    Duplex,
    Lane,
    Link,
    MeshwrightError,
    Op,
    Recompute,
    Schedule,
    StageCost,
    Timeline,
    Transfer,
    Value,
    check,
    even_costs,
    lower,
    schedules,
    simulate,
)
from meshwright.ir.action import Entry, Kind, actions
from tests.random_schedules import (
    Case,
    build,
    built,
    cases,
    label,
    named,
    random_case,
    random_cluster,
    random_costs,
    row_count,
    rows_of,
)

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
                self._node(node, (self._sync_s(entry), 0.0), compute, joint, *came[_key(entry)])
                joint = node
                came[(Op.U, entry.version) if entry.op is Op.N else (Op.U, entry.stage, entry.version)].append(node)
            else:
                node = (worker, entry)
                arrived = [n for action in actions(entry) for n in came[_key(action)]]
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


def _key(action: Action) -> Hashable:
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


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_are_legal(block: int) -> None:
    for rng in seeded(block, 50):
        case = random_case(rng)
        verdict = check(case.schedule)
        assert verdict.ok, verdict
        verdict = check(lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster))
        assert verdict.ok, verdict


@pytest.mark.parametrize("block", range(21))
def test_both_simulators_agree_on_random_schedules(block: int) -> None:
    for rng in seeded(block, 100):
        compare(random_case(rng))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100, 200))
def test_both_simulators_agree_on_larger_random_schedules(block: int) -> None:
    for rng in seeded(block, 30):
        compare(random_case(rng, workers=7, stages=8, microbatches=9, replicas=4))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_both_simulators_agree_on_drawn_schedules(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_both_simulators_agree_on_named_schedules(name: str, options: dict[str, object]) -> None:
    for number, schedule in enumerate(built(name, options, (2, 3, 4))):
        rng = Random(f"{name}:{number}")
        for sync in ("eager", "lazy", "eager-opt"):
            costs, cluster = random_costs(rng, schedule.stages), random_cluster(rng, schedule.workers)
            compare(Case(schedule, costs, cluster, sync, rng.choice((0.0, 0.5, 1.0))))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), named(), ids=label)
@pytest.mark.parametrize("workers", [8, 16])
def test_both_simulators_agree_on_larger_named_schedules(name: str, options: dict[str, object], workers: int) -> None:
    schedule = build(name, options, workers=workers)
    rng = Random(f"{name}:{workers}")
    for sync in ("eager", "lazy"):
        compare(Case(schedule, random_costs(rng, schedule.stages), random_cluster(rng, schedule.workers), sync, 0.5))


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_both_simulators_agree_on_ring_sync(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    rng = Random(name)
    compare(Case(schedule, random_costs(rng, schedule.stages), random_cluster(rng, schedule.workers), "ring", 0.0))


def test_both_simulators_agree_on_ring_sync_of_random_schedules() -> None:
    for rng in seeded(7, 100):
        compare(random_case(rng)._replace(sync="ring"))


def test_lowered_lists_simulate_like_the_schedule_they_come_from() -> None:
    for rng in seeded(0, 60):
        case = random_case(rng)
        lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster)
        whole = simulate(case.schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
        assert simulate(lowered, case.costs, case.cluster, overlap=case.overlap) == whole


# Laws of time, on random schedules.


def test_no_lane_does_two_things_at_once() -> None:
    for rng in seeded(1, 100):
        case = random_case(rng)
        timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
        lanes: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for span in timeline.spans:
            end = span.end_s
            lane: object = span.lane
            if isinstance(span.entry, Transfer):
                cluster = case.cluster or Cluster()
                peer = span.entry.peer
                source, target = (span.worker, peer) if span.entry.sends else (peer, span.worker)
                end -= cluster.between(source, target).latency_s
                lane = peer if cluster.duplex is Duplex.HALF else (span.entry.sends, peer)
            lanes[span.worker, lane].append((span.start_s, end))
        for lane, busy in lanes.items():
            busy.sort()
            for (_, end), (start, _) in pairwise(busy):
                assert start >= end - CLOSE, lane


def test_nothing_starts_before_its_inputs_are_there() -> None:
    """From first principles: rows travel from stage to stage and back, each hop at least as long as its link."""
    for rng in seeded(2, 100):
        case = random_case(rng)
        schedule, placement = case.schedule, case.schedule.placement
        timeline = simulate(schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
        times = {(s.worker, _key(a)): (s.start_s, s.end_s) for s in timeline.spans for a in actions(s.entry)}
        for (worker, key), (start, _) in times.items():
            if not isinstance(key, tuple) or len(key) != 5:
                continue
            op, stage, mb, replica, part = key
            near = {Op.F: stage - 1, Op.B: stage + 1, Op.I: stage + 1}.get(op, -1)
            if 0 <= near < schedule.stages:
                mine = rows_of(placement, placement.team(replica, stage, mb), worker)
                team = placement.team(replica, near, mb)
                for other in team:
                    if rows := mine & rows_of(placement, team, other):
                        ops = (Op.F,) if op is Op.F else (Op.B, Op.I)
                        ended = max(times[other, k][1] for o in ops if (other, k := (o, near, mb, replica, part)) in times)
                        way = hop_s(case, near, stage, len(rows), part, (other, worker))
                        assert start >= ended + way - CLOSE
            for before in {Op.B: (Op.F, Op.R), Op.I: (Op.F, Op.R), Op.R: (Op.F,), Op.W: (Op.I,)}.get(op, ()):
                for k in ((before, stage, mb, replica, part), (before, stage, mb, replica, -1)):
                    if (worker, k) in times:
                        assert start >= times[worker, k][1] - CLOSE


def hop_s(case: Case, stage: int, near: int, rows: int, part: int, ends: tuple[int, int]) -> float:
    """The time of some rows on their way from a stage to the one near it, if they have one."""
    if ends[0] == ends[1] or case.cluster is None:
        return 0.0
    cost = case.costs[min(stage, near)]
    size = (cost.output_bytes if stage < near else cost.gradient_bytes) * rows / row_count(case.schedule.placement)
    link = case.cluster.between(*ends)
    return link.latency_s + size / (1 if part < 0 else case.schedule.parts) / link.bytes_per_s


def test_raising_a_cost_never_lowers_the_makespan() -> None:
    for rng in seeded(3, 100):
        case = random_case(rng)
        lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster)
        stage = rng.randrange(lowered.stages)
        name = rng.choice(("forward_s", "input_s", "weight_s", "recompute_s", "sync_s", "output_bytes", "gradient_bytes"))
        raised = list(case.costs)
        raised[stage] = replace(raised[stage], **{name: getattr(raised[stage], name) + rng.choice((0.5, 3.0))})
        before = simulate(lowered, case.costs, case.cluster)
        after = simulate(lowered, raised, case.cluster)
        assert after.makespan_s >= before.makespan_s - CLOSE
        assert after.lower_bound_s >= before.lower_bound_s - CLOSE
        late = spans(after)
        assert all(late[place][0] >= start - CLOSE for place, (start, _) in spans(before).items())


def test_a_slower_link_never_lowers_the_makespan() -> None:
    for rng in seeded(4, 60):
        case = random_case(rng)
        cluster = case.cluster or Cluster()
        lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=cluster)
        slow = {
            (a, b): Link(cluster.between(a, b).latency_s + rng.choice((0.0, 0.5)), cluster.between(a, b).bytes_per_s / 2)
            for a in range(lowered.workers)
            for b in range(lowered.workers)
        }
        before = simulate(lowered, case.costs, cluster).makespan_s
        assert simulate(lowered, case.costs, replace(cluster, links=slow)).makespan_s >= before - CLOSE
        free = simulate(lowered, case.costs, Cluster(duplex=cluster.duplex)).makespan_s
        assert free <= before + CLOSE


def test_all_times_scale_together() -> None:
    for rng in seeded(5, 60):
        case = random_case(rng)
        lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster)
        factor = rng.choice((0.25, 3.0, 1000.0))
        costs = [StageCost(**{k: v * factor if k.endswith("_s") else v for k, v in asdict(c).items()}) for c in case.costs]
        cluster = case.cluster or Cluster()
        links = {pair: scaled(link, factor) for pair, link in cluster.links.items()}
        before = simulate(lowered, case.costs, cluster, overlap=case.overlap)
        after = simulate(lowered, costs, replace(cluster, link=scaled(cluster.link, factor), links=links), overlap=case.overlap)
        late = spans(after)
        for place, (start, end) in spans(before).items():
            assert late[place] == pytest.approx((start * factor, end * factor), rel=1e-9, abs=1e-9)
        assert after.lower_bound_s == pytest.approx(before.lower_bound_s * factor, rel=1e-9, abs=1e-9)
        assert after.bubble_ratio == pytest.approx(before.bubble_ratio, abs=1e-9)


def scaled(link: Link, factor: float) -> Link:
    """A link on which everything takes `factor` times as long."""
    return Link(link.latency_s * factor, link.bytes_per_s / factor)


def test_what_costs_nothing_takes_no_time() -> None:
    for rng in seeded(6, 50):
        case = random_case(rng)
        timeline = simulate(case.schedule, [StageCost()] * case.schedule.stages, None, sync=case.sync, overlap=case.overlap)
        assert timeline.makespan_s == timeline.lower_bound_s == 0.0
        assert all(span.start_s == span.end_s == 0.0 for span in timeline.spans)
        assert timeline.bubble_ratio == timeline.span_bubble_ratio == 0.0


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_no_cost_no_time_on_named_schedules(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    timeline = simulate(schedule, [StageCost()] * schedule.stages)
    assert timeline.makespan_s == timeline.lower_bound_s == 0.0


@pytest.mark.parametrize("steps", [2, 3])
def test_steps_with_a_flush_follow_each_other(steps: int) -> None:
    """T steps take T times one step, span by span; named schedules and random ones."""
    found = [build(name, options) for name, options in named()]
    found += [case.schedule for rng in seeded(8, 40) if repeats(case := random_case(rng))]
    for number, schedule in enumerate(schedule for schedule in found if schedule.flush):
        rng = Random(number)
        costs, cluster = random_costs(rng, schedule.stages), random_cluster(rng, schedule.workers)
        one = simulate(schedule, costs, cluster)
        many = simulate(schedule.repeated(steps), costs, cluster)
        assert many.makespan_s == pytest.approx(steps * one.makespan_s, rel=1e-9, abs=1e-9), schedule.name
        times = spans(many)
        for (worker, entry), (start, end) in spans(one).items():
            for step in range(steps):
                later = start + step * one.makespan_s, end + step * one.makespan_s
                assert times[worker, entry.shifted(step * schedule.microbatches, step)] == pytest.approx(later, abs=1e-8)


def repeats(case: Case) -> bool:
    """Can the same lists run again? Only if a step later every microbatch meets the same team."""
    teams = [teams for copy in case.schedule.placement.teams for teams in copy]
    return all(case.schedule.microbatches % len(each) == 0 for each in teams)


# The bound.


def chain_bound(forward: Sequence[float], backward: Sequence[float], sync: Sequence[float], count: int) -> float:
    """Head, round trip, tail on resources in a row (stage, channel, stage ..): the planning specification's formula."""
    best = 0.0
    for k in range(len(forward)):
        head, trip = sum(forward[:k]), sum(forward[k + 1 :]) + sum(backward[k + 1 :])
        body = max(count * forward[k], forward[k] + trip) + count * backward[k]
        best = max(best, head + body + tail(backward, sync, k))
    return best


def tail(backward: Sequence[float], sync: Sequence[float], k: int) -> float:
    """What follows a backward on resource k: the way to a stage at or before it, and that stage's sync."""
    return max(sum(backward[2 * n : k]) + sync[n] for n in range(k // 2 + 1))


def forward_bound(forward: Sequence[float], backward: Sequence[float], sync: Sequence[float], count: int) -> float:
    """All forwards of a resource, and then what the last of them still has before it: its way to any stage's sync."""
    best = 0.0
    for k in range(len(forward)):
        turn = sum(forward[: k + 1]) + (count - 1) * forward[k] + sum(forward[k + 1 :])
        ends = [turn + sum(backward[2 * n :]) + sync[n] for n in range(len(sync))]
        best = max(best, *ends)
    return best


def random_chain(rng: Random, stages: int, count: int) -> tuple[Case, list[float], list[float], list[float]]:
    """A plain chain with half-duplex channels and syncs, and its resources in a row."""
    low = rng.choice((0.0, 0.5))
    costs = [
        StageCost(
            forward_s=rng.uniform(low, 2),
            input_s=rng.uniform(low, 2),
            weight_s=rng.choice((0.0, rng.uniform(low, 2))),
            sync_s=rng.choice((0.0, rng.uniform(0, 4))),
            output_bytes=rng.uniform(low, 2),
            gradient_bytes=rng.uniform(low, 2),
        )
        for _ in range(stages)
    ]
    links = {(s, s + 1): Link(0.0, rng.choice((0.5, 1.0, 4.0))) for s in range(stages - 1)}
    cluster = Cluster(Link(), links, Duplex.HALF)
    forward, backward = [], []
    for stage, cost in enumerate(costs):
        forward.append(cost.forward_s)
        backward.append(cost.backward_s)
        if stage < stages - 1:
            speed = links[stage, stage + 1].bytes_per_s
            forward.append(cost.output_bytes / speed)
            backward.append(cost.gradient_bytes / speed)
    schedule = schedules.build(rng.choice(("gpipe", "onef1b")), workers=stages, microbatches=count)
    case = Case(schedule, tuple(costs), cluster, "eager", 0.0)
    return case, forward, backward, [cost.sync_s for cost in costs]


def test_the_bound_of_a_chain_is_head_round_trip_tail() -> None:
    """It equals the formula wherever no backward is shorter than its forward.

    Elsewhere one more term can lead, which the formula leaves out: all forwards of a resource, then the way of the last.
    """
    longer = 0
    for number, rng in enumerate(seeded(9, 200)):
        case, forward, backward, sync = random_chain(rng, stages=rng.randint(1, 4), count=rng.randint(1, 6))
        bound = simulate(case.schedule, case.costs, case.cluster).lower_bound_s
        known = chain_bound(forward, backward, sync, case.schedule.microbatches)
        more = forward_bound(forward, backward, sync, case.schedule.microbatches)
        assert bound == pytest.approx(max(known, more), abs=1e-9), number
        longer += more > known + CLOSE
        if all(b >= f for f, b in zip(forward, backward, strict=True)) and not any(sync):
            assert bound == pytest.approx(known, abs=1e-9), number
    assert longer, "the extra term never led: it is not tried"


def test_the_bound_of_a_chain_with_long_backwards_is_the_formula() -> None:
    for rng in seeded(10, 100):
        stages, count = rng.randint(1, 5), rng.randint(1, 8)
        forward = [rng.uniform(0, 2) for _ in range(2 * stages - 1)]
        backward = [f * rng.choice((1.0, 2.0, 3.0)) for f in forward]
        sync = sorted((rng.uniform(0, 3) for _ in range(stages)), reverse=True)
        costs = [
            StageCost(forward[2 * s], backward[2 * s], sync_s=sync[s], output_bytes=o, gradient_bytes=g)
            for s, (o, g) in enumerate(zip([*forward[1::2], 0.0], [*backward[1::2], 0.0], strict=True))
        ]
        schedule = schedules.build("onef1b", workers=stages, microbatches=count)
        bound = simulate(schedule, costs, Cluster(Link(0.0, 1.0), duplex=Duplex.HALF)).lower_bound_s
        assert bound == pytest.approx(chain_bound(forward, backward, sync, count), abs=1e-9)


class Operation(NamedTuple):
    """One step of a microbatch's tour: where, how long, and the lag before the next step."""

    machine: Hashable
    length: float
    lag: float = 0.0


def optimum(tour: Sequence[Operation], ends: dict[int, float], count: int) -> float:
    """The best makespan of `count` equal tours over machines that do one thing at a time: all active schedules, tried out.

    `ends[j]` is what follows step j outside of all machines. Equal tours keep their order at every step, which loses nothing.
    """
    behind = [0.0] * len(tour)
    for step in reversed(range(len(tour))):
        here = tour[step].length
        after = tour[step].lag + behind[step + 1] if step + 1 < len(tour) else 0.0
        behind[step] = here + max(after, ends.get(step, 0.0))
    best = float("inf")

    def extend(done: tuple[int, ...], ready: tuple[tuple[float, ...], ...], free: dict[Hashable, float], reached: float) -> None:
        nonlocal best
        open_ = [step for step in range(len(tour)) if done[step] < count and done[step] < (done[step - 1] if step else count)]
        if not open_:
            best = min(best, reached)
            return
        starts = {step: max(ready[step][done[step]], free.get(tour[step].machine, 0.0)) for step in open_}
        if max([reached, *(starts[step] + behind[step] for step in open_)]) >= best - CLOSE:
            return
        first = min(open_, key=lambda step: starts[step] + tour[step].length)
        soonest = starts[first] + tour[first].length
        rivals = [step for step in open_ if tour[step].machine == tour[first].machine and starts[step] <= soonest]
        for step in sorted(rivals, key=lambda step: -step):
            end = starts[step] + tour[step].length
            later = list(ready)
            if step + 1 < len(tour):
                later[step + 1] = (*ready[step + 1], end + tour[step].lag)
            total = max(reached, end + ends.get(step, 0.0))
            count_up = tuple(n + (s == step) for s, n in enumerate(done))
            extend(count_up, tuple(later), {**free, tour[step].machine: end}, total)

    extend((0,) * len(tour), ((0.0,) * count, *((),) * (len(tour) - 1)), {}, 0.0)
    return best


def chain_tour(case: Case) -> tuple[list[Operation], dict[int, float]]:
    """A chain's tour, from its costs and links alone: stage, channel, .. there and back."""
    stages, cluster = case.schedule.stages, case.cluster or Cluster()
    half = cluster.duplex is Duplex.HALF
    tour: list[Operation] = []
    ends: dict[int, float] = {}
    for stage, cost in enumerate(case.costs):
        tour.append(Operation(stage, cost.forward_s))
        if stage < stages - 1:
            link = cluster.between(stage, stage + 1)
            tour.append(Operation(("link", stage), cost.output_bytes / link.bytes_per_s, link.latency_s))
    for stage, cost in reversed(list(enumerate(case.costs))):
        ends[len(tour)] = cost.sync_s
        tour.append(Operation(stage, cost.backward_s))
        if stage:
            link = cluster.between(stage, stage - 1)
            way = ("link", stage - 1) if half else ("back", stage - 1)
            tour.append(Operation(way, case.costs[stage - 1].gradient_bytes / link.bytes_per_s, link.latency_s))
    return tour, ends


def test_no_schedule_of_a_chain_beats_the_bound() -> None:
    """Against the proven optimum of small chains, with half and full duplex, latency and syncs; it is often reached."""
    reached = 0
    for rng in seeded(11, 120):
        case, *_ = random_chain(rng, stages=rng.randint(1, 3), count=rng.randint(1, 3))
        if rng.random() < 0.5:
            links = {pair: replace(link, latency_s=rng.uniform(0, 1)) for pair, link in case.cluster.links.items()}
            case = case._replace(cluster=replace(case.cluster, links=links, duplex=rng.choice(list(Duplex))))
        best = optimum(*chain_tour(case), count=case.schedule.microbatches)
        for name in ("gpipe", "onef1b"):
            schedule = schedules.build(name, workers=case.schedule.stages, microbatches=case.schedule.microbatches)
            timeline = simulate(schedule, case.costs, case.cluster)
            assert timeline.lower_bound_s <= best + CLOSE
            assert timeline.makespan_s >= best - CLOSE
        reached += timeline.lower_bound_s >= best - CLOSE
    assert reached > 60


def all_orders(schedule: Schedule, most: int) -> Iterator[Schedule]:
    """The same actions in every order of every list; nothing if there are more than `most`."""
    orders = []
    total = 1
    for entries in schedule.lists:
        if len(entries) > 6:
            return
        found = [order for order in permutations(entries) if in_order(order)]
        orders.append(found)
        total *= len(found)
    if total <= most:
        for lists in product(*orders):
            yield replace(schedule, period=lists)


def in_order(entries: Sequence[Entry]) -> bool:
    """Does every microbatch of a list go F, R, B or I, W?"""
    place = {entry: index for index, entry in enumerate(entries)}
    for action in place:
        assert isinstance(action, Action)
        for op in {Op.B: (Op.F, Op.R), Op.I: (Op.F, Op.R), Op.R: (Op.F,), Op.W: (Op.I,)}.get(action.op, ()):
            for part in {action.part, -1}:
                if place.get(action._replace(op=op, part=part), -1) > place[action]:
                    return False
    return True


def test_no_order_of_the_lists_beats_the_bound() -> None:
    """Tiny random placements (replicas, teams, several stages on a worker): the bound against every order of every list."""
    tried = runs = 0
    for rng in seeded(12, 260):
        case = random_case(rng, workers=3, stages=2, microbatches=2, replicas=2, cells=False)
        makespans, bounds = [], []
        for schedule in all_orders(case.schedule, most=60):
            try:
                timeline = simulate(schedule, case.costs, case.cluster, sync=case.sync)
            except MeshwrightError:
                continue
            makespans.append(timeline.makespan_s)
            bounds.append(timeline.lower_bound_s)
        if len(makespans) > 1:
            assert max(bounds) <= min(makespans) + CLOSE
            assert max(bounds) - min(bounds) <= CLOSE, "the bound is of the placement, not of an order"
            tried += 1
            runs += len(makespans)
    assert tried > 50 and runs > 400, (tried, runs)


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_named_schedules_keep_their_bound(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    for send in (0.0, 0.3):
        costs = even_costs(stages=schedule.stages, workers=schedule.workers, sync_s=0.5)
        timeline = simulate(schedule, costs, Cluster(Link(send)))
        busiest = max(timeline.busy_s(worker) for worker in range(timeline.workers))
        assert busiest - CLOSE <= timeline.lower_bound_s <= timeline.makespan_s + CLOSE


# Gradient syncs.


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_eager_sync_is_never_later_than_lazy_on_named_schedules(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    for sync_s in (0.0, 0.5, 2.0, 8.0):
        for send in (0.0, 0.3):
            costs = even_costs(stages=schedule.stages, workers=schedule.workers, sync_s=sync_s)
            times = {s: simulate(schedule, costs, Cluster(Link(send)), sync=s).makespan_s for s in ("eager", "lazy", "eager-opt")}
            assert times["eager"] <= times["lazy"] + CLOSE
            assert times["eager-opt"] <= times["lazy"] + CLOSE


def test_eager_sync_of_one_unit_is_never_later_than_lazy() -> None:
    """With one unit to sync. With several an early one can stand in the way of a longer one: then neither always wins."""
    for rng in seeded(13, 100):
        case = random_case(rng)
        stage = rng.randrange(case.schedule.stages)
        costs = [replace(cost, sync_s=cost.sync_s if s == stage else 0.0) for s, cost in enumerate(case.costs)]
        eager, lazy = (simulate(case.schedule, costs, sync=sync).makespan_s for sync in ("eager", "lazy"))
        assert eager <= lazy + CLOSE


@pytest.mark.parametrize("options", schedules.compared("chimera"), ids=label)
@pytest.mark.parametrize("sync", ["eager", "lazy", "eager-opt"])
def test_a_collective_starts_when_its_last_member_arrives(options: dict[str, object], sync: str) -> None:
    """Chimera's replicas: each stage is on two workers (more with pairs), whose last gradients come at different times."""
    schedule = build("chimera", options)
    waited = 0
    for rng in seeded(14, 6):
        costs = random_costs(rng, schedule.stages, recompute=False)
        costs = tuple(replace(cost, sync_s=cost.sync_s + 0.5, forward_s=cost.forward_s + 0.1) for cost in costs)
        cluster = random_cluster(rng, schedule.workers)
        lists = lower(schedule, sync=sync, costs=costs, cluster=cluster).lists
        timeline = simulate(schedule, costs, cluster, sync=sync)
        times = spans(timeline)
        lanes = {(span.worker, span.entry): span.lane for span in timeline.spans}
        syncs = {entry for _, entry in times if isinstance(entry, Action) and entry.op is Op.S}
        assert len(syncs) == schedule.units
        for action in syncs:
            members = [worker for worker in range(schedule.workers) if (worker, action) in times]
            assert tuple(members) == schedule.holders[action.stage] and len(members) >= 2
            arrivals = []
            for worker in members:
                before = [e for e in lists[worker][: lists[worker].index(action)] if not isinstance(e, Transfer)]
                arrivals.append(max(times[worker, entry][1] for entry in before))
                assert lanes[worker, action] is Lane.COLLECTIVE
            for worker in members:
                wanted = max(arrivals), max(arrivals) + costs[action.stage].sync_s
                assert times[worker, action] == pytest.approx(wanted, abs=1e-9)
            waited += max(arrivals) > min(arrivals) + CLOSE
    assert waited, "all members always came together: nothing was tried"
