"""The mapping of a plan to devices: the search chooses it by price, so the same plan on other devices is not faster."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, Host, LayerCost, Link, Parallel, Profile, simulate
from meshwright.costs.placed_plan import placed_costs, placed_links
from meshwright.planners._limits import PlanLimits
from meshwright.planners._search.interchangeable import arrangements, count_of_arrangements, interchangeable
from meshwright.planners._search.problem import Problem
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.settled_plan import settled
from tests.support.plans import cluster_of, random_profile, random_rates


def equal(count: int, *, output: float, parameters: float) -> Profile:
    """Equal layers of three seconds."""
    return Profile(
        tuple(LayerCost(f"{n}", (1.0,), (1.0,), (1.0,), output_bytes=output, parameter_bytes=parameters) for n in range(count))
    )


def step_s(plan: Parallel, cluster: Cluster, ranks: tuple[int, ...] = ()) -> float:
    """The lists that training would run, on the devices that the ranks name."""
    given = {**plan.given(), "ranks": ranks[: plan.processes] or plan.ranks}
    placed = Parallel.of(given)
    lists = lists_for(settled(placed))
    costs = placed_costs(placed, lists, placed.costs, cluster)
    return simulate(lists, costs, placed_links(placed, lists, cluster)).makespan_s


CASES: dict[str, tuple[Profile, dict[str, Any]]] = {
    "any": (equal(8, output=4.0, parameters=4.0), {}),
    "a line": (equal(8, output=4.0, parameters=40.0), {"schedule": "onef1b", "pp": 6}),
    "copies": (equal(8, output=4.0, parameters=4.0), {"schedule": "interleaved", "pp": 2, "dp": 3}),
    "two directions": (equal(8, output=4.0, parameters=4.0), {"schedule": "chimera", "pp": 4}),
}


@pytest.mark.parametrize(
    "name", ["two directions", *(pytest.param(name, marks=pytest.mark.slow) for name in ("any", "a line", "copies"))]
)
def test_the_same_plan_is_not_faster_on_other_devices(name: str) -> None:
    """Links without any structure; the devices by number, and ten times at random."""
    profile, more = CASES[name]
    for seed in range(1 if name == "two directions" else 2):
        cluster = cluster_of(random_rates(seed, 6))
        plan = mw.plan(profile, cluster, microbatches=4, planner="search", **more)
        parallel = mw.runnable(plan)
        planned = step_s(parallel, cluster)
        assert planned <= plan.step_s * (1 + 1e-9), "devices of a stage only ever send what both of a pair have"
        others = [tuple(range(6)), *(tuple(random.Random(n).sample(range(6), 6)) for n in range(10))]
        assert min(step_s(parallel, cluster, ranks) for ranks in others) >= planned * (1 - 1e-9), (seed, parallel.ranks)


@pytest.mark.slow
def test_hosts_whose_devices_are_not_numbered_in_a_row() -> None:
    """Every second device is on the same host: a plan keeps what talks most inside a host."""
    rates = tuple(tuple(0.0 if a == b else 8.0 if a % 2 == b % 2 else 0.5 for b in range(8)) for a in range(8))
    cluster = Cluster(devices=(Device(),) * 8, bandwidths=rates)
    plan = mw.plan(equal(8, output=4.0, parameters=4.0), cluster, microbatches=4, planner="search", schedule="chimera", pp=8)
    parallel = mw.runnable(plan)
    assert step_s(parallel, cluster) < 0.8 * step_s(parallel, cluster, tuple(range(8)))


@pytest.mark.parametrize(
    "more",
    [
        {"schedule": "interleaved", "pp": 4, "dp": 2},
        {"schedule": "zbv", "pp": 4, "dp": 2},
        pytest.param({"schedule": "chimera", "pp": 8}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_priced_on_its_devices_as_it_was_planned(more: dict[str, Any]) -> None:
    """The planner's own price, and that of the lists on the devices of the plan: the same for stages of one device."""
    hosts = (Host(4, Link(1e-3, 9.0), Link(1e-2, 3.0)),) * 2
    cluster = Cluster(devices=(Device(bytes_per_s=1e3),) * 8, hosts=hosts)
    plan = mw.plan(equal(16, output=4.0, parameters=4.0), cluster, microbatches=8, planner="search", **more)
    found = step_s(mw.runnable(plan), cluster) + plan.causes["update"]
    assert found == pytest.approx(plan.step_s, rel=1e-9)


def test_links_that_differ_only_in_latency() -> None:
    """One pair of devices answers late: no two neighbours of the pipeline are this pair."""
    count, late = 4, {(0, 1), (1, 0), (2, 3), (3, 2)}
    rates = tuple((8.0,) * count for _ in range(count))
    latencies = tuple(tuple(5.0 if (a, b) in late else 0.0 for b in range(count)) for a in range(count))
    cluster = Cluster(devices=(Device(),) * count, bandwidths=rates, latencies=latencies)
    profile = equal(4, output=4.0, parameters=4.0)
    plan = mw.plan(profile, cluster, microbatches=4, planner="search", schedule="chimera", pp=4)
    parallel = mw.runnable(plan)
    best = min(step_s(parallel, cluster, ranks) for ranks in permutations(range(count)))
    assert step_s(parallel, cluster) == pytest.approx(best, rel=1e-9)
    assert best < step_s(parallel, cluster, tuple(range(count)))


def test_devices_that_can_trade_places() -> None:
    """Devices of a host are alike, unless they differ in speed, in memory, in a link, or in the card that they share."""
    profile = equal(4, output=4.0, parameters=4.0)

    def kinds(cluster: Cluster) -> list[int]:
        return interchangeable(Problem(profile, cluster, PlanLimits(), microbatches=4, batch=None))

    fast, slow = Device("fast", flops_per_s={"fp32": 2.0}), Device("slow", flops_per_s={"fp32": 1.0})
    host = Host(2, Link(0.0, 8.0), Link(0.0, 8.0))
    assert kinds(Cluster(devices=(fast,) * 4)) == [0, 0, 0, 0]
    assert kinds(Cluster(devices=(fast, slow, fast, slow))) == [0, 1, 0, 1]
    assert kinds(Cluster(devices=(fast, replace(fast, memory_bytes=1.0), fast))) == [0, 1, 0]
    assert kinds(Cluster(devices=(fast,) * 4, hosts=(host, host))) == [0, 0, 2, 2]
    assert kinds(Cluster(devices=(fast,) * 4, hosts=(Host(4, Link(0.0, 8.0), Link(0.0, 4.0), cards=2),))) == [0, 0, 2, 2]
    assert kinds(Cluster(devices=(fast,) * 4, links={(0, 1): Link(1.0, 8.0), (1, 0): Link(1.0, 8.0)})) == [0, 0, 2, 2]
    assert kinds(Cluster(devices=(fast,) * 3, links={(0, 1): Link(1.0, 8.0), (1, 0): Link(2.0, 8.0)})) == [0, 1, 2]


def renamed(cluster: Cluster, devices: tuple[int, ...]) -> Cluster:
    """The same cluster; device n is the one that was `devices[n]`."""
    return replace(cluster, bandwidths=tuple(tuple(cluster.bandwidths[a][b] for b in devices) for a in devices))


def one_way_rates(seed: int, count: int) -> tuple[tuple[float, ...], ...]:
    """Links without any structure that differ by direction."""
    choose = random.Random(seed)
    return tuple(tuple(0.0 if a == b else 10 ** choose.uniform(-0.5, 1.0) for b in range(count)) for a in range(count))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))])
def test_names_of_devices_do_not_matter_and_a_request_gives_no_faster_plan(seed: int) -> None:
    """Also not the order of the devices that share a stage, which decides who sends to whom."""
    choose = random.Random(seed)
    layers, count, microbatches = choose.randint(2, 6), choose.randint(3, 4), choose.choice((1, 2, 4))
    profile, cluster = random_profile(seed, layers), cluster_of(one_way_rates(seed, count))
    plan = mw.plan(profile, cluster, microbatches=microbatches, planner="search")
    other = renamed(cluster, tuple(choose.sample(range(count), count)))
    assert mw.plan(profile, other, microbatches=microbatches, planner="search").step_s == pytest.approx(plan.step_s, rel=1e-9)
    asked = mw.plan(profile, cluster, microbatches=microbatches, planner="search", pp=min(2, layers))
    assert asked.step_s >= plan.step_s * (1 - 1e-9)


def test_orders_of_devices_are_counted_without_doubles() -> None:
    """Against all orders of some devices, of which those are the same that differ only in equal devices."""
    for kinds in ([0, 1, 2], [0, 0, 2, 2], [0, 1, 0, 1, 4], [0] * 6):
        found = list(arrangements(kinds))
        every = {tuple(kinds[d] for d in order) for n in range(1, len(kinds) + 1) for order in permutations(range(len(kinds)), n)}
        assert len(found) == len(every) and {tuple(kinds[d] for d in order) for order in found} == every
        assert all(len(set(order)) == len(order) for order in found)
        counts = count_of_arrangements(kinds)
        assert counts == [1, *(sum(len(order) == n for order in found) for n in range(1, len(kinds) + 1))]
