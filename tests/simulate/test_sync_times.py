"""When gradient syncs run: eager never later than lazy, and no collective before its last member."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import Action, Cluster, Lane, Link, Op, Transfer, even_costs, lower, schedules, simulate
from tests.support.random_schedules import build, label, named, random_case, random_cluster, random_costs
from tests.support.reference import CLOSE, seeded, spans


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
