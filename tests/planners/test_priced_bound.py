"""The bound of a plan whose links are known: no order is shorter, and what it excludes would not have been chosen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Duplex, LayerCost, Link, Profile, StageCost
from meshwright.ir.schedule import Sharding
from meshwright.planners._pricing import pricing
from meshwright.planners._pricing.priced_bound import split_bound_s
from meshwright.simulate.quick_sweep import QuickProgram
from tests.support.plans import cluster_of, random_rates


def random_costs(choose: random.Random, stages: int, *, again: bool) -> list[StageCost]:
    found = []
    for stage in range(stages):
        size = choose.random() if stage < stages - 1 else 0.0
        cost = StageCost(choose.random(), choose.random(), choose.random(), output_bytes=size, gradient_bytes=size / 2)
        sync = choose.choice((0.0, 5.0)) * choose.random()
        found.append(replace(cost, sync_s=sync, recompute_s=cost.forward_s if again else 0.0))
    return found


@pytest.mark.parametrize("name", ["zbv", "chimera"])
def test_no_order_is_shorter(name: str) -> None:
    """Links that are slow or fast, with latency, in one direction at a time or in both; with recompute and divided state."""
    tight = 0
    for seed in range(100):
        choose = random.Random(seed)
        workers, microbatches = 2 * choose.randint(1, 4), 2 * choose.randint(1, 10)
        costs = random_costs(choose, workers * (2 if name == "zbv" else 1), again=seed % 5 == 0)
        slow = choose.choice((0.0, 0.3, 3.0))
        ends = [(a, b) for b in range(workers) for a in range(b)]
        pairs = {pair: Link(slow * choose.random(), 1 / (slow * choose.random() + 1e-9)) for pair in ends}
        links = Cluster(Link(), pairs, choose.choice((Duplex.FULL, Duplex.HALF)))
        options = {} if name == "zbv" else {"split": True}
        schedule = mw.schedules.build(name, workers=workers, microbatches=microbatches, costs=costs, **options)
        schedule = replace(schedule, sharding=choose.choice((Sharding.NONE, Sharding.STATE, Sharding.GRADIENTS)))
        bound = split_bound_s(schedule.placement, costs, links, microbatches)
        step = QuickProgram(schedule).makespan_s(costs, links)
        assert bound <= step * (1 + 1e-9), seed
        tight += bound > 0.9 * step
    assert tight > 10


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_plans_that_were_not_built_would_not_have_been_chosen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound all of them are built and simulated. The answer is the same, with the best plan of every schedule."""
    choose = random.Random(seed)

    def near(value: float) -> float:
        return choose.uniform(0.5, 1.5) * value

    layers = tuple(
        LayerCost(f"{n}", (near(2),), (near(2),), (1.0,), output_bytes=near(3), parameter_bytes=9.0) for n in range(40)
    )
    profile, cluster = Profile(layers), cluster_of(random_rates(seed, 36))
    found = mw.plan(profile, cluster, microbatches=12, planner="search")
    monkeypatch.setattr(pricing, "split_bound_s", lambda *_: 0.0)
    whole = mw.plan(profile, cluster, microbatches=12, planner="search")
    assert whole.counts["simulated"] > found.counts["simulated"], "nothing was excluded"
    same = ("parallel", "stages", "step_s", "lower_bound_s", "alternatives", "peak_bytes")
    assert all(getattr(found, name) == getattr(whole, name) for name in same)
