"""The bound of a plan whose links are known: no order is shorter, and what it excludes would not have been chosen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Duplex, LayerCost, Link, Profile, StageCost
from meshwright.ir.schedule import Sharding
from meshwright.planners._pricing import pricing
from meshwright.planners._pricing.priced_bound import priced_bound_s
from meshwright.planners._search.bound_queue import BoundQueue
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.families import FAMILIES, Family, shaped_by_costs
from meshwright.planners._search.tensor_costs import TensorChoice
from meshwright.simulate.quick_sweep import QuickProgram
from tests.support.plans import cluster_of, random_rates


def random_costs(choose: random.Random, shares: Sequence[float]) -> list[StageCost]:
    found = []
    for stage, share in enumerate(shares):
        size = choose.random() if stage < len(shares) - 1 else 0.0
        cost = StageCost(choose.random(), choose.random(), choose.random(), output_bytes=size, gradient_bytes=size / 2)
        sync = choose.choice((0.0, 5.0)) * choose.random()
        found.append(replace(cost, sync_s=sync, recompute_s=share * cost.forward_s))
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_order_is_shorter(family: Family) -> None:
    """Links that are slow or fast, with latency, in one direction at a time or in both; with recompute and divided state."""
    tight = tried = 0
    for seed in range(150):
        choose = random.Random(seed)
        workers, microbatches = 2 * choose.randint(1, 4), 2 * choose.randint(1, 10)
        if not family.fits(workers, microbatches):
            continue
        shares = family.recompute_shares(workers * family.chunks, seed % 5 == 0 or (family.early and seed % 5 < 4))
        costs = random_costs(choose, shares)
        slow = choose.choice((0.0, 0.3, 3.0))
        ends = [(a, b) for b in range(workers) for a in range(b)]
        pairs = {pair: Link(slow * choose.random(), 1 / (slow * choose.random() + 1e-9)) for pair in ends}
        links = Cluster(Link(), pairs, choose.choice((Duplex.FULL, Duplex.HALF)))
        options = {**family.options, **({"costs": costs} if shaped_by_costs(family) else {})}
        schedule = mw.schedules.build(family.schedule, workers=workers, microbatches=microbatches, **options)
        assert schedule.placement == family.placement(workers)
        schedule = replace(schedule, sharding=choose.choice((Sharding.NONE, Sharding.STATE, Sharding.GRADIENTS)))
        most = [(family.most or family.live)(w, workers, microbatches) for w in range(workers)]
        bound = priced_bound_s(schedule.placement, costs, links, microbatches, split=family.split, early=family.early, most=most)
        step = QuickProgram(schedule).makespan_s(costs, links)
        assert bound <= step * (1 + 1e-9), seed
        tried, tight = tried + 1, tight + (bound > 0.8 * step)
    assert tried > 15
    assert tight > 0.1 * tried


def test_a_bound_of_split_backwards_is_no_bound_of_whole_ones() -> None:
    """Whole backwards delay the stages before them. A bound that forgets that is too low to exclude anything."""
    costs = [StageCost(1.0, 1.0, 3.0)] * 4
    placement = mw.schedules.build("onef1b", workers=4, microbatches=4).placement
    whole, split = (priced_bound_s(placement, costs, Cluster(), 4, split=split, most=[4, 3, 2, 1]) for split in (False, True))
    assert whole == QuickProgram(mw.schedules.build("onef1b", workers=4, microbatches=4)).makespan_s(costs) == 35.0
    assert split < whole


def test_a_queue_gives_the_lowest_bound_first() -> None:
    """Candidates whose bounds were raised come back in their order, and nothing is lost."""
    choose = random.Random(0)
    plan = Candidate(FAMILIES[0], 1, 1, TensorChoice(1), None, 1, 1, "replicated", False, "stages", (1,), 0.0)
    given = [replace(plan, pp=n, bound_s=bound) for n, bound in enumerate(sorted(choose.random() for _ in range(50)))]
    queue, seen, final = BoundQueue(given), [], {}
    for _ in range(70):
        lowest = queue.lowest()
        assert lowest is not None
        queue.pop()
        assert not seen or lowest.bound_s >= seen[-1]
        seen.append(lowest.bound_s)
        if lowest.sharp:
            final[lowest.pp] = lowest
        else:
            queue.put_back(replace(lowest, bound_s=lowest.bound_s + choose.random() / 4, sharp=True))
    rest = queue.rest()
    assert [each.bound_s for each in rest] == sorted(each.bound_s for each in rest)
    assert sorted([*final, *(each.pp for each in rest)]) == list(range(50))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_plans_that_were_not_built_would_not_have_been_chosen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound more of them are simulated. The plan is the same, and the best plan of every schedule as good."""
    choose = random.Random(seed)

    def near(value: float) -> float:
        return choose.uniform(0.5, 1.5) * value

    layers = tuple(
        LayerCost(f"{n}", (near(2),), (near(2),), (1.0,), output_bytes=near(3), parameter_bytes=9.0) for n in range(40)
    )
    profile, cluster = Profile(layers), cluster_of(random_rates(seed, 36))
    found = mw.plan(profile, cluster, microbatches=12, planner="search")
    monkeypatch.setattr(pricing, "priced_bound_s", lambda *_, **__: 0.0)
    whole = mw.plan(profile, cluster, microbatches=12, planner="search")
    assert whole.counts["simulated"] > found.counts["simulated"], "nothing was excluded"
    assert all(getattr(found, name) == getattr(whole, name) for name in ("parallel", "stages", "step_s", "peak_bytes"))
    assert found.lower_bound_s >= whole.lower_bound_s
    theirs = {each.row["schedule"]: each.step_s for each in whole.alternatives if each.row}
    for each in found.alternatives:
        if each.row:
            assert each.step_s <= theirs[each.row["schedule"]] * (1 + 1e-9), each.plan
