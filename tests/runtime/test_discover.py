"""`discover` finds what is there: links that were shaped, hosts, and devices with their speeds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright import Cluster, Device, Link, MeshwrightError, cluster_from_toml
from meshwright.runtime.discover import device_speed, link_speed
from meshwright.runtime.discover.discover import alike, chosen_pairs, described, discover, measure_ranks
from meshwright.runtime.discover.link_speed import MeasuredPair
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.transport.choose import open_transport
from tests.support import namespaces
from tests.support.namespaces import MB, Namespaces, Rates

CPU = torch.device("cpu")


def measured_links() -> list[MeasuredPair]:
    """The links alone: what a rank measured as a source."""
    pairs = chosen_pairs([str(rank) for rank in range(dist.get_world_size())])
    transport = open_transport("auto", link_speed.channels(pairs), dist.get_rank(), device=CPU)
    found = link_speed.measure_pairs(transport, pairs, CPU)
    transport.close()
    return found


def whole_file() -> str:
    """What rank 0 would write; small matrices, because links are the question here."""
    device_speed.LONG_S, device_speed.LARGEST = 1e-4, 256
    found = measure_ranks(CPU)
    return "" if found is None else found.text


def possible() -> None:
    if why := namespaces.missing():
        pytest.skip(why)


def assert_recovered(found: Cluster, rates: Rates) -> None:
    """Every rate within a tenth."""
    ratios = [found.between(a, b).bytes_per_s / rate for a, row in enumerate(rates) for b, rate in enumerate(row) if a != b]
    assert ratios and all(0.9 <= ratio <= 1.1 for ratio in ratios), ratios


def test_two_shaped_links() -> None:
    possible()
    rates = [[0, 5 * MB], [20 * MB, 0]]
    with Namespaces(rates) as network:
        pairs = [pair for one in network.run(measured_links) for pair in one]
    for pair in pairs:
        assert 0.9 <= pair.bytes_per_s / rates[pair.source][pair.target] <= 1.1, pairs
        assert 0 < pair.latency_s < 0.05
    assert [(pair.source, pair.target) for pair in pairs] == [(0, 1), (1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rates",
    [
        namespaces.flat(8),
        namespaces.two_levels(8, 4),
        namespaces.scattered(8, seed=3),
        [[0, 5e6, 2e7], [1e7, 0, 5e6], [2e7, 1e7, 0]],
    ],
    ids=["flat", "two levels", "random", "directions differ"],
)
def test_shaped_links_are_recovered(rates: list[list[float]]) -> None:
    """The file of rank 0 has every rate within a tenth."""
    possible()
    with Namespaces(rates) as network:
        text, *others = network.run(whole_file)
    assert others == [""] * (len(rates) - 1)
    found = cluster_from_toml(text)
    assert_recovered(found, rates)
    assert len(found.hosts) == len(rates), "each namespace is a host"
    assert bool(found.bandwidths) == (rates != namespaces.flat(8)), "hosts explain the flat one, others need matrices"
    assert found.collective.bytes_per_s > 0.8 * max(max(row) for row in rates), "links decide, not collectives"
    assert found.devices[0].memory_bytes > 1e8 and found.devices[0].flops_per_s["fp32"] > 0


def test_this_machine(workers: Workers) -> None:
    """Two local workers: one host with a link inside, and everything about a device."""
    text, other = workers.run(whole_file, ranks=2)
    found = cluster_from_toml(text)
    assert other == "" and len(found.hosts) == 1 and found.size == 2
    [device] = set(map(repr, found.devices))
    core = found.devices[0]
    assert "core" in device and core.flops_per_s["fp32"] > 1e6 and core.bytes_per_s > 1e6 and core.launch_s > 0
    assert found.collective.latency_s > found.between(0, 1).latency_s, "messages go through shared memory, collectives do not"
    assert found.between(0, 1).bytes_per_s > 1e6 and text.startswith(
        "# Measured by `meshwright cluster discover`: 2 ranks on 1 host"
    )


def test_which_pairs_are_measured() -> None:
    assert chosen_pairs(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    homes = ["a"] * 8 + ["b"] * 8 + ["c"]
    assert chosen_pairs(homes) == [(0, 1), (8, 9), (0, 8), (0, 16), (8, 0), (8, 16), (16, 0), (16, 8)]
    assert chosen_pairs(["a"]) == []


def seen(homes: str, rate: dict[tuple[str, str], float]) -> list[MeasuredPair]:
    return [MeasuredPair(a, b, 1e-5, rate[homes[a], homes[b]]) for a, b in chosen_pairs(homes)]


def test_hosts_where_they_explain_all_pairs() -> None:
    """The slower of two cards decides, so three hosts with cards of 5, 3 and 3 are hosts."""
    rates = {(a, b): 50.0 if a == b else min({"x": 5.0, "y": 3.0, "z": 3.0}[end] for end in (a, b)) for a in "xyz" for b in "xyz"}
    found = described("xxyyzz", [Device()] * 6, seen("xxyyzz", rates))
    assert not found.bandwidths and [host.devices for host in found.hosts] == [2, 2, 2]
    assert found.between(0, 1) == Link(1e-5, 50.0) and found.between(0, 2) == Link(1e-5, 3.0)


def test_matrices_where_hosts_do_not() -> None:
    rates = {(a, b): 50.0 if a == b else 1.0 if {a, b} == {"x", "y"} else 5.0 for a in "xyz" for b in "xyz"}
    homes = "xxyyzz"
    found = described(homes, [Device()] * 6, seen(homes, rates))
    assert all(found.between(a, b).bytes_per_s == rates[homes[a], homes[b]] for a in range(6) for b in range(6) if a != b)
    assert found.host_of == (0, 0, 1, 1, 2, 2)
    many = "x" * 8 + "y" * 8 + "z" * 8
    large = described(many, [Device()] * 24, seen(many, rates))
    assert large.between(3, 12).bytes_per_s == 1.0 and large.between(5, 7).bytes_per_s == 50.0


def test_equal_devices_are_not_told_apart_by_noise() -> None:
    rows = [
        {"kind": "a", "memory_bytes": 1.0, "flops_per_s": {"fp32": x, **more}, "bytes_per_s": x, "launch_s": x}
        for x, more in ((1.0, {}), (2.0004, {"fp8": 1.0}), (9.0, {}))
    ]
    assert [Device(**one) for one in alike(rows)] == [Device("a", 1.0, {"fp32": 2.0}, 2.0, 2.0)] * 3


def scattered_hosts() -> str:
    """A group whose ranks of one host do not follow each other."""
    from meshwright.runtime.discover import discover as module

    module.host_identity = lambda: "xyx"[dist.get_rank()]
    try:
        measure_ranks(CPU)
    except MeshwrightError as error:
        return error.what
    return "measured"


def test_scattered_ranks_are_refused_on_all_ranks() -> None:
    with Workers(3) as pool:
        assert pool.run(scattered_hosts) == ["the ranks of a host must be consecutive, got 2 hosts in 3 runs of ranks"] * 3


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshwrightError, match="at least one worker, got 0"):
        discover(workers=0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshwrightError, match="torchrun has started the workers, so --workers 3 has no effect"):
        discover(workers=3)
