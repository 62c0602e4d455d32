"""The mapping of a plan to devices: the search chooses it by price, so the same plan on other devices is not faster."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, Host, LayerCost, Link, Parallel, Profile, simulate
from meshwright.costs.placed_plan import placed_costs, placed_links
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.settled_plan import settled
from tests.support.plans import cluster_of, random_rates


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
