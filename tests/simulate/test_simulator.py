"""The simulator against a second one (`reference.py`), and laws of time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings

from meshwright import Cluster, Duplex, Link, Op, StageCost, Transfer, check, lower, schedules, simulate
from meshwright.ir.action import actions
from meshwright.simulate.simulator import proved_with_peaks
from tests.support.random_schedules import (
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
from tests.support.reference import CLOSE, compare, key_of, seeded, spans
from tests.support.thin import thinned


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_are_legal(block: int) -> None:
    for rng in seeded(block, 50):
        case = random_case(rng)
        verdict = check(case.schedule)
        assert verdict.ok, verdict
        verdict = check(lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster))
        assert verdict.ok, verdict


@pytest.mark.parametrize("block", thinned(range(21), 4))
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
        times = {(s.worker, key_of(a)): (s.start_s, s.end_s) for s in timeline.spans for a in actions(s.entry)}
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


@pytest.mark.parametrize("name", ["onef1b", "gpipe", "zero_bubble"])
def test_the_pace_of_a_worker_is_that_of_its_stage(name: str) -> None:
    """With one stage on each worker, a slower worker is a stage with larger compute times: messages and sums keep theirs."""
    paces, compute = (1.0, 0.5, 3.0, 1.75), ("forward_s", "input_s", "weight_s", "recompute_s")
    costs = [StageCost(1.0 + k, 1.0, 0.5 * k, sync_s=2.0, output_bytes=1.0, gradient_bytes=1.0) for k in range(4)]
    cluster = Cluster(Link(0.125, 2.0))
    lowered = lower(schedules.build(name, workers=4, microbatches=6), costs=costs, cluster=cluster)
    slower = [replace(c, **{field: getattr(c, field) * pace for field in compute}) for c, pace in zip(costs, paces, strict=True)]
    paced, kinds = proved_with_peaks(lowered, costs, cluster, paces=paces)
    assert (paced.spans, kinds) == ((same := proved_with_peaks(lowered, slower, cluster))[0].spans, same[1])
    assert paced.spans != proved_with_peaks(lowered, costs, cluster)[0].spans


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
