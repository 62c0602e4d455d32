"""Prices of plans, worked out by hand: what they hold, send, add up and update."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, Host, LayerCost, Link, Profile
from meshwright.costs.gradient_sums import sums_beside, ties_of
from meshwright.costs.placed_plan import placed_costs, placed_links
from meshwright.costs.stages import Charge, sent_share, stage_costs, stage_links
from meshwright.ir.cluster import Duplex
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.planners import NothingFitsError
from meshwright.planners._limits import PlanLimits
from meshwright.planners._search import wide_plans
from meshwright.planners._search.problem import Problem
from meshwright.planners.search import Search
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.settled_plan import settled
from tests.support.plans import cluster_of, random_profile, random_rates


def layer(name: str = "layer", *, seconds: float = 1.0, **more: Any) -> LayerCost:
    return LayerCost(name, (seconds,), (seconds,), (seconds,), **more)


def devices(*memory: float, rate: float = 1e9) -> Cluster:
    return Cluster(Link(0.0, rate), devices=tuple(Device("gpu", size) for size in memory))


def searched(profile: Profile, cluster: Cluster, **asked: Any) -> mw.Plan:
    return mw.plan(profile, cluster, planner="search", **asked)


@pytest.mark.parametrize("seed", range(25))
def test_no_wide_plan_is_faster_than_its_bounds(seed: int) -> None:
    """Stages of any width, equal and unequal devices, links that differ by direction, whole and split backwards."""
    choose = random.Random(seed)
    layers, count, microbatches = choose.randint(2, 6), choose.randint(2, 5), choose.randint(1, 6)
    rates = tuple(tuple(choose.uniform(0.5, 8) for _ in range(count)) for _ in range(count))
    speeds = [choose.choice((1.0, 2.0)) if seed % 2 else 1.0 for _ in range(count)]
    kinds = tuple(Device(f"kind {speed}", flops_per_s={"fp32": speed}) for speed in speeds)
    cluster = Cluster(Link(choose.choice((0.0, 0.2))), devices=kinds, bandwidths=rates)
    cluster = replace(cluster, duplex=choose.choice((Duplex.FULL, Duplex.HALF)))
    problem = Problem(random_profile(seed, layers), cluster, PlanLimits(), microbatches=microbatches, batch=None)
    pricer = Search(problem).pricer
    every = list(wide_plans.every_plan(layers, range(count)))
    tight = 0
    for stages in choose.sample(every, min(30, len(every))):
        whole, split = wide_plans.bounds_s(problem, stages, microbatches, None)
        for plan in wide_plans.as_plans(problem, stages, microbatches, None, "test"):
            priced = pricer.quick(plan)
            bound = split if plan.family.split else whole
            assert priced is not None and bound <= priced.step_s * (1 + 1e-9), (plan.family.name, stages)
            tight += bound > 0.9 * priced.step_s
    assert tight > 0


def test_a_split_backward_overlaps_with_the_way_down() -> None:
    """Two equal layers: the second half of the last backward runs while the first half of the other stage does."""
    half = LayerCost("half", (1.0,), (1.0,), (2.0,))
    plan = searched(Profile((half, half)), cluster_of(((0.0, 1e9), (1e9, 0.0))), microbatches=2, pp=2, schedule="zero_bubble")
    assert plan.step_s == pytest.approx(9.0)


def test_what_does_not_depend_on_rows_is_not_divided() -> None:
    """Four devices share the rows; each of them still has the fixed bytes, and one of them has two of five rows."""
    fixed = Profile((layer(fixed_bytes=100.0),), rows=(1,))
    scratch = Profile((layer(fixed_transient_bytes=100.0),), rows=(1,))
    rows = Profile((layer(saved_bytes=10.0),), rows=(1,))
    for profile, memory, asked in ((fixed, 60.0, 4), (scratch, 60.0, 4), (rows, 19.0, 5)):
        for planner in ("spp", "search"):
            with pytest.raises(NothingFitsError):
                mw.plan(profile, devices(*[memory] * 4), microbatches=1, rows=asked, planner=planner)
    fits = mw.plan(rows, devices(*[21.0] * 4), microbatches=1, rows=5, planner="search")
    assert max(use.activations for use in fits.memory) == 20.0


def test_a_profile_without_rows_divides_what_it_can() -> None:
    chain = Profile((layer(saved_bytes=8.0, fixed_bytes=3.0, transient_bytes=4.0, fixed_transient_bytes=1.0),)).shared(None, 4)
    assert (chain.forward_s, chain.saved_bytes, chain.transient_bytes) == ((0.25,), (5.0,), (2.0,))


@pytest.mark.parametrize(("width", "after", "rows"), [(2, 2, 5), (3, 2, 7), (1, 4, 6), (4, 3, 5), (2, 3, 6)])
def test_the_largest_message_is_that_of_the_rows_in_common(width: int, after: int, rows: int) -> None:
    def owned(count: int) -> list[set[int]]:
        marks = [rows * k // count for k in range(count + 1)]
        return [set(range(a, b)) for a, b in pairwise(marks)]

    most = max(len(a & b) for a in owned(width) for b in owned(after))
    assert sent_share(width, after, rows, Charge.ROWS) == most / rows


def test_links_count_by_direction() -> None:
    """Outputs go one way, gradients the other."""
    profile = Profile((layer(output_bytes=6.0), layer()))
    cluster = Cluster(Link(), devices=(Device(),) * 2, bandwidths=((0.0, 2.0), (3.0, 0.0)))
    stages = (PlanStage(0, 0, (0,)), PlanStage(1, 1, (1,)))
    links = stage_links(stages, cluster)
    assert links.between(0, 1).bytes_per_s == 2.0 and links.between(1, 0).bytes_per_s == 3.0
    plan = searched(profile, cluster, microbatches=1, schedule="onef1b", pp=2)
    assert plan.step_s == pytest.approx(min(1 + 3 + 3 + 2 + 2, 1 + 2 + 3 + 3 + 2))  # the devices may trade places
    half = stage_links(stages, cluster, charge=Charge.PAIRS)
    assert half.between(0, 1) == half.between(1, 0) == Link(0.0, 2.0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_slowest_memory_decides_about_an_update(order: tuple[int, int]) -> None:
    """Both devices hold one layer of 1 GB: 3 GB and twice the state of 2 GB are moved, at 1 GB/s on the slower one."""
    rates = [1e12, 1e9]
    kinds = tuple(Device("gpu", bytes_per_s=rates[n]) for n in order)
    profile = Profile((layer(parameter_bytes=1e9),) * 2)
    for planner, asked in (("search", {"schedule": "onef1b", "pp": 2}), ("even", {}), ("spp", {})):
        plan = mw.plan(profile, Cluster(Link(0.0, 1e12), devices=kinds), microbatches=4, planner=planner, **asked)
        moved = 7.0 if len(plan.stages) == 2 else 14.0
        assert plan.causes["update"] == pytest.approx(moved)


def test_tied_parameters_of_two_stages_are_added_up() -> None:
    """10 bytes over a link of 1 byte/s: a scatter and a gather of half of them each."""
    plain = Profile((layer(parameter_bytes=10.0), layer(parameter_bytes=10.0)))
    tied = replace(plain, layers=tuple(replace(each, ties=("w",)) for each in plain.layers))
    cluster = devices(1e9, 1e9, rate=1.0)
    free, dear = (searched(each, cluster, microbatches=2, pp=2, schedule="onef1b") for each in (plain, tied))
    assert dear.step_s - free.step_s == pytest.approx(10.0) and dear.causes["sync"] == pytest.approx(10.0)
    assert searched(tied, cluster, microbatches=2).row["pp"] == 1, "one device needs no sum"
    assert [tie.layers for tie in ties_of(tied)] == [(0, 1)] and not ties_of(plain)
    copies = stage_costs(tied, [PlanStage(0, 0, (0, 1)), PlanStage(1, 1, (2, 3))], devices(*[1e9] * 4, rate=1.0))
    assert [cost.tied_bytes for cost in copies] == [10.0, 10.0]
    assert copies[0].sync_s == pytest.approx(2 * 3 / 4 * 10.0) and copies[1].sync_s == 0.0, "each gradient is added up once"


def test_sums_of_several_stages_share_the_cards_of_their_hosts() -> None:
    """Two hosts with four devices and one card: four sums leave each host at once."""
    host = Host(4, Link(0.0, 1e12), Link(0.0, 1e9))
    profile = Profile((layer(seconds=1e-4, parameter_bytes=1e9),) * 4)
    steps = []
    for cards in (0, 1, 2):
        cluster = Cluster(devices=(Device("gpu"),) * 8, hosts=(replace(host, cards=cards),) * 2)
        stages = tuple(PlanStage(n, n, (n, n + 4)) for n in range(4))
        steps.append(stage_costs(profile, stages, cluster)[0].sync_s)
    assert steps == pytest.approx([1.0, 4.0, 2.0])
    cluster = Cluster(devices=(Device("gpu"),) * 8, hosts=(replace(host, cards=1),) * 2)
    assert sums_beside(cluster, [(0, 1), (2, 6), (2, 6), (3, 7)]) == [1, 2, 2, 2], "inside a host; twice on one device"
    assert sums_beside(cluster, [(0, 4)], tp=2) == [2]
    plan = searched(profile, cluster, microbatches=4, pp=4, dp=2, schedule="onef1b")
    assert plan.causes["sync"] >= 3.9 or {frozenset(s.devices) for s in plan.stages} != {frozenset((n, n + 4)) for n in range(4)}


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_fits_is_found_with_unequal_memory(seed: int) -> None:
    """Messages are as large as activations. Every plan is tried, and the engine's memory curve decides."""
    choose = random.Random(seed)
    layers = tuple(
        layer(str(n), seconds=choose.uniform(0.5, 2), output_bytes=choose.uniform(1, 4), saved_bytes=choose.uniform(1, 4))
        for n in range(4)
    )
    kinds = tuple(Device("gpu", choose.uniform(8, 40)) for _ in range(4))
    profile, cluster = Profile(layers), replace(cluster_of(random_rates(seed, 4)), devices=kinds)
    problem = Problem(profile, cluster, PlanLimits(tensor=False), microbatches=4, batch=None)
    pricer = Search(problem).pricer
    best = float("inf")
    for stages in wide_plans.every_plan(4, range(4)):
        for plan in wide_plans.as_plans(problem, stages, 4, None, "test", best):
            priced = pricer.quick(plan)
            assert priced is not None
            if priced.over_bytes <= 0 and priced.step_s < best:
                pricer.engine(priced)
                best = priced.step_s if priced.over_bytes <= 0 else best
    if best == float("inf"):
        with pytest.raises(NothingFitsError):
            searched(profile, cluster, microbatches=4, tensor=False)
    else:
        assert searched(profile, cluster, microbatches=4, tensor=False).step_s <= best * (1 + 1e-9)


def test_the_slowest_and_the_smallest_device_of_a_stage_decide() -> None:
    """A stage on two devices: the slower one decides its time, the smaller one what it may hold; each call has a launch cost."""
    kinds = (
        Device("a", 100.0, flops_per_s={"fp32": 4.0}, launch_s=0.25),
        Device("b", 50.0, flops_per_s={"fp32": 1.0}, launch_s=0.125),
    )
    cluster = Cluster(Link(0.0, 1.0), devices=kinds)
    profile = Profile((layer(),), device="a")
    (cost,) = stage_costs(profile, [PlanStage(0, 0, (0, 1))], cluster)
    assert (cost.forward_s, cost.input_s, cost.weight_s) == (4 / 2 + 0.25, 4 / 2 + 0.25, 4 / 2)
    (again,) = stage_costs(profile, [PlanStage(0, 0, (0, 1), recompute=1.0)], cluster)
    assert again.recompute_s == again.forward_s
    problem = Problem(profile, cluster, PlanLimits(), microbatches=1, batch=None)
    (plan, *_) = wide_plans.as_plans(problem, (PlanStage(0, 0, (0, 1)),), 1, None, "test")
    assert Search(problem).pricer.price(plan).capacity == (50.0,)


@pytest.mark.parametrize("planner", ["search", "spp"])
def test_a_stage_of_devices_that_differ_is_said(planner: str) -> None:
    kinds = [Device(name, 1e9, {"fp32": flops}) for name, flops in (("a", 4.0), ("b", 3.0))]
    profile = Profile((layer(parameter_bytes=4.0),), device="a")

    def said(*devices: Device) -> bool:
        plan = mw.plan(profile, Cluster(Link(0.0, 1e9), devices=devices), microbatches=4, planner=planner)
        assert plan.widths == (2,)
        return any("devices of one stage differ" in note for note in plan.notes)

    assert said(*kinds) and not said(kinds[0], kinds[0])


def test_messages_of_a_faster_device_wait_and_count() -> None:
    """The last stage has a slow and a fast device. The fast one sends its gradients early, and they wait at the first stage."""

    def waiting(fast: float) -> float:
        kinds = tuple(Device("b" if flops == 1.0 else "a", 1e12, {"fp32": flops}) for flops in (1.0, fast, 1.0))
        cluster = Cluster(Link(0.0, 1.0), devices=kinds)
        first = layer("first", seconds=2.0, output_bytes=1.0, saved_bytes=1.0, parameter_bytes=4.0)
        last = layer("last", seconds=1.5, output_bytes=1.0, saved_bytes=1.0, parameter_bytes=4.0)
        problem = Problem(Profile((first, last), device="b"), cluster, PlanLimits(), microbatches=(n := 150), batch=None)
        stages = (PlanStage(0, 0, (0,)), PlanStage(1, 1, (1, 2)))
        plans = wide_plans.as_plans(problem, stages, n, None, "test")
        pricer = Search(problem).pricer
        _, (use, _) = pricer.engine(pricer.price(next(plan for plan in plans if plan.family.schedule == "gpipe")))
        return use.activations + use.messages

    assert waiting(1.0) < 1.05 * waiting(3.0) < 1.05 * waiting(8.0)
    assert waiting(8.0) > 1.15 * waiting(1.0)


def test_zero_3_has_no_tensor_ranks() -> None:
    """A run refuses both together, so no such plan is enumerated."""
    block = layer("block", saved_bytes=1e6, parameter_bytes=4e6, flops=1e9, output_bytes=1e6)
    host = Host(4, Link(1e-6, 1e11), Link(1e-5, 1e10))
    cluster = Cluster(devices=(Device("gpu", 6e7, {"fp32": 1e13}),) * 4, hosts=(host,))
    problem = Problem(Profile((block,) * 6, rows=(1,), tokens_per_row=64), cluster, PlanLimits(), microbatches=None, batch=8)
    listed = Search(problem).enumerator.run()
    divided = [each for each in (*listed.fit, *listed.misfit) if each.zero == "zero-3"]
    assert divided and all(each.tensor.tp == 1 for each in divided)
    assert any(each.tensor.tp > 1 for each in (*listed.fit, *listed.misfit))


@pytest.mark.parametrize(("asked", "shares"), [({"schedule": "onef1b"}, [1.0, 1.0]), ({}, [1.0, 0.0])])
def test_stages_of_several_devices_recompute(asked: dict[str, Any], shares: list[float]) -> None:
    """Two devices share the first layer. A microbatch of 400 bytes does not fit twice on them; with recompute it is there once.

    The first stage then takes 1 + 1 + 2 seconds for each of six microbatches on each of its devices. Under the shifted critical
    path, which is the fastest, the last stage recomputes nothing.
    """
    first = layer("first", seconds=2.0, output_bytes=2.0, saved_bytes=400.0, parameter_bytes=4.0)
    last = layer("last", output_bytes=2.0, saved_bytes=20.0, parameter_bytes=40.0)
    profile = Profile((first, last))
    roomy = searched(profile, devices(*[600.0] * 3, rate=2.0), microbatches=6)
    tight = searched(profile, devices(*[400.0] * 3, rate=2.0), microbatches=6, **asked)
    assert tight.parallel["schedule"] == asked.get("schedule", "shifted")
    assert [stage.recompute for stage in roomy.stages] == [0.0, 0.0] and [stage.width for stage in roomy.stages] == [2, 1]
    assert [stage.recompute for stage in tight.stages] == shares and [stage.width for stage in tight.stages] == [2, 1]
    assert roomy.step_s < 6 * (1 + 1 + 2) < tight.step_s
    parallel = mw.runnable(tight)
    lists = lists_for(settled(parallel))
    cluster = devices(*[400.0] * 3, rate=2.0)
    costs = placed_costs(parallel, lists, parallel.costs, cluster)
    found = mw.simulate(lists, costs, placed_links(parallel, lists, cluster))
    assert found.makespan_s + tight.causes["update"] == pytest.approx(tight.step_s, rel=1e-9)
    assert max(tight.peak_bytes) <= 400.0


@pytest.mark.parametrize("asked", [{"pp": 2, "dp": 4}, {"pp": 4, "dp": 1}, {"pp": 2, "dp": 1}])
def test_a_plan_is_priced_again_with_the_network_cards_that_it_shares(asked: dict[str, Any]) -> None:
    host = Host(4, Link(0.0, 1e12), Link(0.0, 1e9), cards=1)
    cluster = Cluster(devices=(Device("gpu"),) * 8, hosts=(host,) * 2)
    profile = Profile((layer(seconds=1e-2, output_bytes=2e6, parameter_bytes=1e5),) * 8)
    plan = searched(profile, cluster, microbatches=8, schedule="onef1b", **asked)
    keywords = settled(mw.Parallel.of(dict(plan.parallel)))
    schedule = lists_for(keywords, steps=1)
    costs = placed_costs(keywords, schedule, keywords.costs, cluster)
    again = mw.simulate(schedule, costs, placed_links(keywords, schedule, cluster)).makespan_s
    assert again == pytest.approx(plan.step_s - plan.causes["update"], rel=1e-9)
    alone = replace(cluster, hosts=(replace(host, cards=0),) * 2)
    crossing = {frozenset(device // 4 for device in stage.devices) for stage in plan.stages} == {frozenset({0}), frozenset({1})}
    if asked["dp"] > 1 and crossing:
        assert again > 1.01 * mw.simulate(schedule, costs, placed_links(keywords, schedule, alone)).makespan_s


@pytest.mark.parametrize("asked", [{"pp": 4, "dp": 1}, {"pp": 2, "dp": 2}, {"pp": 4, "schedule": "chimera"}])
def test_a_plan_with_tied_parameters_is_priced_again_on_other_links(asked: dict[str, Any]) -> None:
    """Also the sum of parameters that the first and the last stage share takes the time of the other links."""
    fast, slow = (
        Cluster(devices=(Device("gpu"),) * 4, hosts=(Host(4, Link(1e-5, rate), Link(1e-5, rate)),)) for rate in (1e9, 1e8)
    )
    ends = layer("wte", seconds=1e-2, parameter_bytes=1e6, ties=("wte.weight",))
    profile = Profile((ends, *(layer(seconds=1e-2, output_bytes=1e4, parameter_bytes=1e5),) * 6, ends))
    plan = searched(profile, fast, microbatches=8, **{"schedule": "onef1b", **asked})
    keywords = settled(mw.Parallel.of(dict(plan.parallel)))
    schedule = lists_for(keywords, steps=1)
    same, again = (placed_costs(keywords, schedule, keywords.costs, cluster) for cluster in (fast, slow))
    assert [cost.sync_s for cost in same] == pytest.approx([cost.sync_s for cost in keywords.costs], rel=1e-9)
    assert keywords.costs[0].tied_s > 1e-3 and again[0].tied_s > 9 * keywords.costs[0].tied_s
    assert again[0].sync_s >= again[0].tied_s
