"""SPP's execution order: its closed form, the guarantee it comes with, and how it does against exact optima."""

from __future__ import annotations

import random

import pytest

from meshwright import Cluster, Duplex, Link, StageCost, Timeline, check, schedules, simulate
from tests.helpers import peaks, run


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


@pytest.mark.parametrize("part", range(4))
def test_the_guarantee_holds_on_three_thousand_instances(part: int) -> None:
    dice = random.Random(part)
    for _ in range(750):
        costs, microbatches = instance(dice)
        found = listed(costs, microbatches, strict=True)
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


def test_1f1b_is_clearly_worse_when_transfers_matter() -> None:
    costs = [StageCost(1.0, 2.0, output_bytes=0.5, gradient_bytes=0.5)] * 8
    cluster = Cluster(Link(0.0, 1.0), duplex=Duplex.HALF)
    plain = simulate(schedules.build("onef1b", workers=8, microbatches=64), costs, cluster)
    assert listed(costs, 64, strict=True).makespan_s * 1.1 < plain.makespan_s


def test_channel_order_is_kept_by_the_lowered_lists() -> None:
    from meshwright import lower
    from meshwright.ir.action import Kind, Op, Transfer

    schedule = schedules.build("listed", workers=3, microbatches=5)
    for worker, entries in enumerate(lower(schedule).lists[:-1]):
        carried = [e.value for e in entries if isinstance(e, Transfer) and e.peer == worker + 1]
        wanted = [(Kind.ACT if p.op is Op.F else Kind.GRAD, p.mb) for p in schedule.channels[worker].producers]
        assert [(v.kind, v.mb) for v in carried] == wanted
