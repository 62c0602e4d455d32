"""SPP's execution order: its closed form, the guarantee it comes with, and how it does against exact optima."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright import Cluster, Duplex, Lane, Link, StageCost, Timeline, check, lower, schedules, simulate
from meshwright.ir.action import Kind, Op, Transfer
from tests.support.helpers import peaks, run
from tests.support.thin import thinned


def instance(dice: random.Random) -> tuple[list[StageCost], int]:
    """Random stages with channels between them, zero times and ties included."""
    stages, microbatches = dice.randint(1, 6), dice.randint(1, 12)
    whole = dice.random() < 0.3

    def time(largest: float) -> float:
        return float(dice.randint(0, 3)) if whole else dice.random() * largest

    costs = [
        StageCost(time(1) + 0.01, time(1) + 0.01, sync_s=time(2), output_bytes=time(1), gradient_bytes=time(1))
        for _ in range(stages)
    ]
    return costs, microbatches


def listed(costs: list[StageCost], microbatches: int, *, strict: bool) -> Timeline:
    cluster = Cluster(Link(0.0, 1.0), duplex=Duplex.HALF)
    schedule = schedules.build(
        "listed", workers=len(costs), microbatches=microbatches, costs=costs, cluster=cluster, strict=strict
    )
    return simulate(schedule, costs, cluster)


def guarantee(costs: list[StageCost], microbatches: int) -> float:
    """(M + 4S - 2 - 2n) C + A of the worst stage n, with C the work of the busiest stage or channel per microbatch."""
    stages = len(costs)
    busiest = max([c.forward_s + c.backward_s for c in costs] + [c.output_bytes + c.gradient_bytes for c in costs[:-1]])
    return max((microbatches + 4 * stages - 2 - 2 * n) * busiest + costs[n - 1].sync_s for n in range(1, stages + 1))


def refuse_wrong_times(found: Timeline, costs: list[StageCost], microbatches: int) -> None:
    """Each action and message once and in its time, none before what it needs, none beside another on its stage or link."""
    runs: dict[tuple[str, int, int], tuple[float, float]] = {}
    lanes: dict[tuple[str, int], list[tuple[float, float]]] = {}
    ends = {}
    for worker, lane, entry, start, end in found.spans:
        if isinstance(entry, Transfer):
            if lane is not Lane.SEND or entry.value.kind not in (Kind.ACT, Kind.GRAD):
                continue
            where, key = ("link", entry.value.stage), (entry.value.kind.value, entry.value.stage, entry.value.mb)
        elif entry.op is Op.S:
            ends[worker] = (start, end)
            continue
        elif entry.op in (Op.F, Op.B):
            where, key = ("stage", worker), (entry.op.value, worker, entry.mb)
        else:
            continue
        assert key not in runs
        runs[key] = (start, end)
        lanes.setdefault(where, []).append((start, end))
    stages = len(costs)
    for stage, cost in enumerate(costs):
        for mb in range(microbatches):
            tour = [("F", stage, cost.forward_s), ("act", stage, cost.output_bytes), ("F", stage + 1, None)]
            turn = [("F", stage, None), ("B", stage, cost.backward_s)]
            home = [("B", stage + 1, None), ("grad", stage, cost.gradient_bytes), ("B", stage, cost.backward_s)]
            for way in (tour, home) if stage < stages - 1 else (turn, [("F", stage, cost.forward_s)]):
                times = [runs[what, place, mb] for what, place, _ in way]
                assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(times))
                assert all(
                    n is None or end - start == pytest.approx(n) for (start, end), (_, _, n) in zip(times, way, strict=True)
                )
        last = runs["B", stage, microbatches - 1][1]
        start, end = ends.get(stage, (last, last))
        assert start >= last - 1e-9 and end - start == pytest.approx(cost.sync_s if stage in ends else 0.0)
    assert len(runs) == 2 * microbatches * (2 * stages - 1)
    for spans in lanes.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(spans)))


@pytest.mark.parametrize("part", thinned(range(4), 4))
def test_the_guarantee_holds_on_three_thousand_instances(part: int) -> None:
    dice = random.Random(part)
    for _ in range(750):
        costs, microbatches = instance(dice)
        found = listed(costs, microbatches, strict=True)
        refuse_wrong_times(found, costs, microbatches)
        assert found.lower_bound_s - 1e-9 <= found.makespan_s <= guarantee(costs, microbatches) + 1e-9


def test_work_conserving_is_better_on_average_and_kept_the_guarantee() -> None:
    dice = random.Random(9)
    better = 0.0
    for _ in range(200):
        costs, microbatches = instance(dice)
        strict, free = (listed(costs, microbatches, strict=s).makespan_s for s in (True, False))
        assert free <= guarantee(costs, microbatches) + 1e-9
        better += strict - free
    assert better > 0


@pytest.mark.parametrize(("s", "m"), [(1, 1), (1, 4), (2, 3), (4, 8), (4, 32), (8, 64)])
def test_closed_form_of_the_strict_order(s: int, m: int) -> None:
    schedule = schedules.build("listed", workers=s, microbatches=m)
    resources = 2 * s - 1
    for stage, entries in enumerate(schedule.lists):
        k = 2 * stage
        blocks = [(k + mb, 1, "F", mb) for mb in range(m)] + [(2 * resources - 2 - k + mb, 0, "B", mb) for mb in range(m)]
        if stage == s - 1:
            blocks = [(t, 1 - first, op, mb) for t, first, op, mb in blocks]
        assert [str(e) for e in entries] == [f"{stage}{op}{mb}" for _, _, op, mb in sorted(blocks)]
    assert check(schedule).ok
    assert len(schedule.channels) == s - 1


def test_uniform_stages_without_transfers_take_the_time_of_gpipe() -> None:
    for s, m in ((2, 4), (4, 8), (3, 10)):
        assert run("listed", s, m).makespan_s == run("gpipe", s, m).makespan_s
        found = run("listed", s, m)
        assert all(peak <= max(1, 4 * (s - 1 - stage)) for stage, peak in enumerate(peaks(found)))


@pytest.mark.parametrize("seed", range(10))
def test_many_microbatches_reach_the_busiest_resource(seed: int) -> None:
    """T / (M C) goes to 1, and what remains is at most (4 S - 4) C."""
    dice = random.Random(seed)
    costs = [replace(cost, sync_s=0.0) for cost in instance(dice)[0]]
    busiest = max([c.forward_s + c.backward_s for c in costs] + [c.output_bytes + c.gradient_bytes for c in costs[:-1]])
    rest = [listed(costs, m, strict=True).makespan_s - m * busiest for m in (4, 32, 128)]
    assert all(-1e-9 <= more <= (4 * len(costs) - 4) * busiest + 1e-9 for more in rest)
    assert rest[-1] / (128 * busiest) <= 0.2


@pytest.mark.parametrize("scale", [2, pytest.param(6, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)])
def test_against_proved_optima(scale: int) -> None:
    """30 instances for each weight of transfers, up to 4 stages and 6 microbatches, both directions of a link share it."""
    pytest.importorskip("ortools")
    from tests.support.plan_oracle import Line, shortest

    dice, ratios, plain = random.Random(scale), [], []
    cluster = Cluster(Link(0.0, 1.0), duplex=Duplex.HALF)
    for _ in range(30):
        stages, microbatches = dice.randint(2, 4), dice.randint(2, 6)
        forward, backward, sync = (tuple(dice.randint(1, 9) for _ in range(stages)) for _ in range(3))
        there = tuple(dice.randint(0, scale) for _ in range(stages - 1))
        sizes = [*map(float, there), 0.0]
        costs = [
            StageCost(float(f), float(b), sync_s=float(a), output_bytes=d, gradient_bytes=d)
            for f, b, a, d in zip(forward, backward, sync, sizes, strict=True)
        ]
        found = listed(costs, microbatches, strict=True).makespan_s
        best = shortest(Line(forward, backward, there, sync), microbatches, round(found), half=True)
        ratios.append(found / best)
        order = schedules.build("onef1b", workers=stages, microbatches=microbatches)
        plain.append(simulate(order, costs, cluster).makespan_s / best)
    assert sum(ratios) / 30 <= 1.02 and max(ratios) <= 1.15
    assert min(ratios) >= 1.0 - 1e-12 and sum(plain) > sum(ratios)


def test_1f1b_is_clearly_worse_when_transfers_matter() -> None:
    costs = [StageCost(1.0, 2.0, output_bytes=0.5, gradient_bytes=0.5)] * 8
    cluster = Cluster(Link(0.0, 1.0), duplex=Duplex.HALF)
    plain = simulate(schedules.build("onef1b", workers=8, microbatches=64), costs, cluster)
    assert listed(costs, 64, strict=True).makespan_s * 1.1 < plain.makespan_s


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_messages_that_wait_unread_under_the_strict_order(stages: int) -> None:
    """Its channels run two blocks ahead of the stage behind them: a third message waits from 7 microbatches on."""
    for microbatches in range(1, 13):
        schedule = schedules.build("listed", workers=stages, microbatches=microbatches)
        depth = min(2, microbatches) if stages == 2 or microbatches < 7 else 3
        assert check(schedule).receive_depth == (depth if stages > 1 else 0), microbatches
        free = schedules.build("listed", workers=stages, microbatches=microbatches, strict=False)
        assert not free.channels, "messages that take no time need no order of their own"
        assert check(free).receive_depth == (min(2, microbatches) if stages > 1 else 0), microbatches


def test_messages_that_wait_unread_where_costs_decide() -> None:
    """What waits on a channel is in flight on the stage before it: 4 (S - 1) at most if strict, no more than a memory cap."""
    dice, cluster = random.Random(5), Cluster(Link(0.0, 1.0), duplex=Duplex.HALF)
    deepest = 0
    for _ in range(20):
        costs, microbatches = instance(dice)
        stages, memory = len(costs), dice.randint(1, 4)
        options: tuple[dict[str, object], ...] = ({}, {"strict": False}, {"memory": memory})
        for given, cap in zip(options, (4 * (stages - 1), microbatches, memory), strict=True):
            schedule = schedules.build("listed", workers=stages, microbatches=microbatches, costs=costs, cluster=cluster, **given)
            result = check(lower(schedule, costs=costs, cluster=cluster))
            assert result.ok and result.receive_depth <= min(cap, max(result.peak_activations)), (given, costs)
            deepest = max(deepest, result.receive_depth)
    assert deepest > 3


def test_channel_order_is_kept_by_the_lowered_lists() -> None:
    schedule = schedules.build("listed", workers=3, microbatches=5)
    for worker, entries in enumerate(lower(schedule).lists[:-1]):
        carried = [e.value for e in entries if isinstance(e, Transfer) and e.peer == worker + 1]
        wanted = [(Kind.ACT if p.op is Op.F else Kind.GRAD, p.mb) for p in schedule.channels[worker].producers]
        assert [(v.kind, v.mb) for v in carried] == wanted
