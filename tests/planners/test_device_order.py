"""The order of devices: minimum cuts against networkx, servers in one piece, and orders that do not depend on names."""

from __future__ import annotations

import random
from itertools import pairwise

import networkx as nx
import pytest

from meshwright.planners._device_order import device_order, minimum_cut


def weights(seed: int, count: int) -> list[list[float]]:
    choose = random.Random(seed)
    found = [[0.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            found[a][b] = found[b][a] = choose.choice([0.0, 1.0, 1.0, choose.uniform(0, 3)])
    return found


@pytest.mark.parametrize("seed", range(200))
def test_minimum_cuts_are_those_of_networkx(seed: int) -> None:
    """With weights that are zero and equal, too."""
    count = 2 + seed % 8
    weight = weights(seed, count)
    graph = nx.Graph()
    graph.add_nodes_from(range(count))
    graph.add_weighted_edges_from((a, b, weight[a][b]) for a in range(count) for b in range(a) if weight[a][b])
    one, other = minimum_cut(range(count), weight)
    assert one and other and sorted(one + other) == list(range(count))
    known = nx.stoer_wagner(graph)[0] if nx.is_connected(graph) else 0.0
    assert sum(weight[a][b] for a in one for b in other) == pytest.approx(known)


def two_levels(inside: float, outside: float, servers: int, each: int, seed: int) -> tuple[list[list[float]], list[int]]:
    """The bandwidths of shuffled devices, and the server of each."""
    home = [k // each for k in range(servers * each)]
    random.Random(seed).shuffle(home)
    return [[inside if a == b else outside for b in home] for a in home], home


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("inside", "outside"), [(25.0, 3.0), (10.0, 9.0), (1.1, 1.0), (300.0, 1.0)])
@pytest.mark.parametrize(("servers", "each"), [(2, 8), (4, 4), (3, 5), (6, 2)])
def test_a_server_stays_in_one_piece(inside: float, outside: float, servers: int, each: int, seed: int) -> None:
    """Whether the minimum cut separates a server or a single device."""
    bandwidths, home = two_levels(inside, outside, servers, each, seed)
    order = device_order(bandwidths)
    assert sorted(order) == list(range(servers * each))
    assert sum(home[a] != home[b] for a, b in pairwise(order)) == servers - 1


def test_few_devices() -> None:
    assert device_order([[0.0]]) == [0]
    assert device_order([[0.0, 1.0], [1.0, 0.0]]) == [0, 1]


def test_fast_links_are_neighbours() -> None:
    """A chain of fast links, with names mixed up."""
    chain = [3, 0, 4, 1, 5, 2]
    place = {device: at for at, device in enumerate(chain)}
    found = device_order([[10.0 if abs(place[a] - place[b]) == 1 else 1.0 for b in range(6)] for a in range(6)])
    assert found in (chain, chain[::-1])
