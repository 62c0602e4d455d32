"""Links as arrays say what the cluster says, for every form of a cluster."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("numpy")

import numpy as np

from meshwright import Cluster, Device, Host, Link
from meshwright.planners._search.device_links import DeviceLinks

NEAR, FAR = Host(3, Link(1e-6, 9e9), Link(1e-5, 3e9)), Host(3, Link(2e-6, 8e9), Link(3e-5, 2e9), rack=1)


def clusters() -> dict[str, Cluster]:
    choose = random.Random(0)
    rates, delays = (tuple(tuple(choose.uniform(1, 9) for _ in range(6)) for _ in range(6)) for _ in range(2))
    shuffled = (4, 0, 5, 2, 1, 3)
    return {
        "one link": Cluster(Link(1e-6, 1e9), devices=(Device(),) * 6),
        "matrix": Cluster(Link(1e-6), bandwidths=rates),
        "latencies": Cluster(bandwidths=rates, latencies=delays),
        "placed matrix": Cluster(bandwidths=rates, latencies=delays).placed(shuffled),
        "hosts": Cluster(hosts=(NEAR, FAR)),
        "placed hosts": Cluster(hosts=(NEAR, FAR)).placed(shuffled),
        "racks": Cluster(hosts=(NEAR, FAR), spine=Link(1e-4, 1e9)),
        "hosts and matrix": Cluster(hosts=(NEAR, FAR), bandwidths=rates),
        "exceptions": Cluster(hosts=(NEAR, FAR), links={(0, 4): Link(1.0, 5.0)}),
    }


@pytest.mark.parametrize("name", clusters())
def test_links_are_those_of_the_cluster(name: str) -> None:
    cluster = clusters()[name]
    links, choose = DeviceLinks(cluster), random.Random(1)
    for a in range(6):
        for b in range(6):
            if a != b:
                latency, rate = links.between(np.array([a]), np.array([b]))
                assert Link(latency[0], rate[0]) == cluster.between(a, b), (a, b)
    for _ in range(30):
        group = choose.sample(range(6), choose.randint(2, 5))
        cut = choose.randint(1, len(group) - 1)
        assert links.slowest(group) == cluster.slowest(group)
        assert links.slowest(group[:cut], group[cut:]) == cluster.slowest(group[:cut], group[cut:])
        assert links.all_reduce_s(group, 1e6) == pytest.approx(cluster.all_reduce_s(group, 1e6))
        assert links.gather_s(group, 1e6) == pytest.approx(cluster.gather_s(group, 1e6))
