"""Links as arrays give what the cluster gives, for every form of a cluster; shared cards are divided in the same way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

np = pytest.importorskip("numpy")

import meshwright as mw  # noqa: E402
from meshwright import Cluster, Duplex, Host, LayerCost, Link, PlanStage, Profile  # noqa: E402
from meshwright.costs.stages import common_rows, stage_links  # noqa: E402
from meshwright.ir.placement import Placement  # noqa: E402
from meshwright.planners._limits import PlanLimits  # noqa: E402
from meshwright.planners._search.device_links import DeviceLinks  # noqa: E402
from meshwright.planners._search.grid_layout import grid, worker_links  # noqa: E402
from meshwright.planners._search.problem import Problem  # noqa: E402

FAST, CARD = Link(1e-6, 1e11), Link(1e-5, 1e10)
SLOW_HOST = Host(2, Link(3e-6, 5e10), Link(4e-5, 2e9), cards=1)
CLUSTERS = {
    "one link": Cluster(Link(1e-5, 1e9), devices=(mw.Device(),) * 8),
    "hosts": Cluster(hosts=(Host(4, FAST, CARD),) * 2),
    "cards": Cluster(hosts=(Host(4, FAST, CARD, cards=2), SLOW_HOST, SLOW_HOST)),
    "half duplex cards": Cluster(hosts=(Host(4, FAST, CARD, cards=1),) * 2, duplex=Duplex.HALF),
    "racks": Cluster(hosts=tuple(Host(2, FAST, CARD, rack=rack) for rack in (0, 0, 1, 1)), spine=Link(1e-4, 1e9)),
    "matrix": Cluster(
        Link(1e-5),
        bandwidths=tuple(tuple(1e9 * (1 + (3 * a + 5 * b) % 7) for b in range(8)) for a in range(8)),
        latencies=tuple(tuple(1e-6 * (1 + (2 * a + b) % 5) for b in range(8)) for a in range(8)),
    ),
}
CLUSTERS["moved"] = CLUSTERS["cards"].placed((5, 0, 7, 2, 1, 6, 3, 4))
CLUSTERS["moved matrix"] = CLUSTERS["matrix"].placed((5, 0, 7, 2, 1, 6, 3, 4))
CLUSTERS["other links"] = replace(CLUSTERS["cards"], links={(0, 5): Link(1e-3, 1e8), (2, 1): Link(0.0, 3e9)})
CLUSTERS["whole numbers"] = Cluster(Link(0, 1), {(0, 1): Link(0.9, 2.5)}, devices=(mw.Device(),) * 8)
CLUSTERS["whole numbers of hosts"] = Cluster(hosts=(Host(4, Link(0.9, 2.5), Link(0, 1)),) * 2)
CLUSTERS["whole numbers of pairs"] = Cluster(bandwidths=tuple(tuple(1 + (a + b) % 3 for b in range(8)) for a in range(8)))
CLUSTERS["slow collectives"] = replace(CLUSTERS["hosts"], collective=Link(2e-5, 5e9))
CLUSTERS["slow collectives of one link"] = replace(CLUSTERS["one link"], collective=Link(2e-5, 5e8))


@pytest.mark.parametrize("name", CLUSTERS)
def test_links_are_those_of_the_cluster(name: str) -> None:
    cluster, dice = CLUSTERS[name], random.Random(name)
    links = DeviceLinks(cluster)
    a, b = (np.array(x) for x in zip(*[(a, b) for a in range(8) for b in range(8) if a != b], strict=True))
    latency, rate = links.between(a, b)
    wanted = [cluster.between(*pair) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    assert [Link(*pair) for pair in zip(latency.tolist(), rate.tolist(), strict=True)] == wanted
    assert links.rates().tolist() == cluster.rates()
    for _ in range(60):
        some = dice.sample(range(8), dice.randint(1, 8))
        cut = dice.randint(0, len(some))
        assert links.slowest(some) == cluster.slowest(some)
        if 0 < cut < len(some):
            assert links.slowest(some[:cut], some[cut:]) == cluster.slowest(some[:cut], some[cut:])
        size = dice.choice([0.0, 1e3, 1e9])
        assert links.gather_s(some, size) == pytest.approx(cluster.gather_s(some, size), rel=1e-12)
        assert links.all_reduce_s(some, size) == pytest.approx(cluster.all_reduce_s(some, size), rel=1e-12)
        pairs = dice.sample([(a, b) for a in range(8) for b in range(8) if a != b], dice.randint(1, 20))
        assert links.shared_links(pairs) == cluster.shared_links(pairs)


@pytest.mark.parametrize("one", range(1, 9))
@pytest.mark.parametrize("other", range(1, 9))
def test_devices_that_exchange_rows_are_those_of_a_run(one: int, other: int) -> None:
    first, second = tuple(range(one)), tuple(range(one, one + other))
    run = Placement((((first,), (second,)),)).pieces(first, second)
    assert common_rows(one, other) == tuple((a, b - one) for _, a, b in run)


def test_pairs_of_devices_divide_a_card() -> None:
    """Two hosts of four devices with one card: the second stage sends and receives on both sides."""
    cluster = Cluster(hosts=(Host(4, FAST, CARD, cards=1),) * 3)
    stages = (PlanStage(0, 0, (0, 1, 2, 3)), PlanStage(1, 1, (4, 5, 6, 7)), PlanStage(2, 2, (8, 9, 10, 11)))
    for groups in (None, DeviceLinks(cluster)):
        links = stage_links(stages, cluster, groups=groups)
        assert links.between(0, 1) == links.between(1, 2) == Link(1e-5, 1e10 / 8), "four activations, and four gradients"
        alone = stage_links(stages[:2], cluster, groups=groups)
        assert alone.between(0, 1) == Link(1e-5, 1e10 / 4)
    plain = Cluster(hosts=(Host(4, FAST, CARD),) * 3)
    assert stage_links(stages, plain).between(0, 1) == CARD


def test_copies_divide_a_card() -> None:
    """Four copies of a pipeline over two hosts: all four cross the one card of a host."""
    cluster = Cluster(hosts=(Host(4, FAST, CARD, cards=1),) * 2)
    profile = Profile((LayerCost("a", (1.0,), (1.0,), (1.0,), output_bytes=1.0),) * 2)
    problem = Problem(profile, cluster, PlanLimits(), microbatches=4, batch=None)
    for layout, rate in (("stages", 1e10 / 4), ("copies", 1e11)):
        found = worker_links(problem, grid(problem.order, 2, 4, 1, layout), Placement.line(2))
        assert found.between(0, 1).bytes_per_s == rate


@pytest.mark.parametrize("planner", ["spp", "search"])
def test_a_shared_card_makes_a_step_longer_or_another_plan(planner: str) -> None:
    """The step of a plan is priced with the sharing that it causes, by both planners."""
    layers = tuple(LayerCost(f"{n}", (1.0,), (1.0,), (1.0,), output_bytes=2e9, parameter_bytes=4e10) for n in range(8))
    alone, shared = (
        mw.plan(Profile(layers), Cluster(hosts=(Host(4, FAST, CARD, cards=cards),) * 2), microbatches=8, planner=planner)
        for cards in (0, 1)
    )
    assert shared.step_s > alone.step_s * 1.01
