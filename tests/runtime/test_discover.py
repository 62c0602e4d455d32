"""`discover` finds what is there: links that were shaped, hosts, and devices with their speeds."""

from __future__ import annotations

import pytest

from tests.support import namespaces
from tests.support.namespaces import MB, Namespaces


def rates_found(rates: list[list[float]]) -> list[float]:
    """Each measured rate over the shaped one."""
    from meshwright.runtime.discover.link_speed import Pair

    with Namespaces(rates) as network:
        found: list[list[Pair]] = network.run(links_of_everyone)
    pairs = [pair for one in found for pair in one]
    assert len(pairs) == len(rates) * (len(rates) - 1)
    return [pair.bytes_per_s / rates[pair.source][pair.target] for pair in pairs]


def links_of_everyone() -> list[object]:
    """The links alone: what a rank measured as a source."""
    import torch
    import torch.distributed as dist

    from meshwright.runtime.discover import discover, link_speed
    from meshwright.runtime.transport.choose import open_transport

    pairs = discover.chosen_pairs([str(rank) for rank in range(dist.get_world_size())])
    cpu = torch.device("cpu")
    transport = open_transport("auto", link_speed.channels(pairs), dist.get_rank(), device=cpu)
    found = link_speed.measure_pairs(transport, pairs, cpu)
    transport.close()
    return list(found)


@pytest.fixture(autouse=True)
def possible() -> None:
    if why := namespaces.missing():
        pytest.skip(why)


def test_shaped_links_of_three_namespaces() -> None:
    rates = [[0, 5 * MB, 20 * MB], [10 * MB, 0, 5 * MB], [20 * MB, 10 * MB, 0]]
    assert all(0.9 <= ratio <= 1.1 for ratio in rates_found(rates))
