"""Clusters: what is answered from hosts equals what all pairs say, collectives have closed forms, TOML reads back equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import Cluster, Device, Duplex, Host, Link, MeshwrightError, cluster_from_toml, cluster_to_toml, read_cluster
from meshwright.ir.cluster import Cluster as Base
from meshwright.ir.files.cluster_file import preset_names, preset_text
from meshwright.ir.files.cluster_json import cluster_to_json
from tests.support.paths import ROOT

LINKS = st.builds(Link, st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([1.0, 3.0, 7.0, float("inf")]))
HOSTS = st.builds(Host, st.integers(1, 3), LINKS, LINKS, st.integers(0, 3), st.integers(0, 2))
SPEEDS = st.dictionaries(st.sampled_from(["fp32", "bf16", "fp8"]), st.floats(1e-3, 1e20), max_size=2)
POSITIVE = st.floats(1e-9, 1e20) | st.just(float("inf"))
KINDS = st.builds(
    Device, st.sampled_from(["a100", "b c", 'q"\\', "ü\n"]), st.floats(0, 1e15) | st.just(8e10), SPEEDS, POSITIVE, st.floats(0, 1)
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Clusters of every form: plain, hosts, matrices, both, with single links."""
    hosts = tuple(draw(st.lists(HOSTS, max_size=4)))
    count = sum(host.devices for host in hosts) or draw(st.integers(1, 4))
    row = st.lists(st.sampled_from([1.0, 2.5, float("inf")]), min_size=count, max_size=count)
    rates = [draw(row) for _ in range(count)] if draw(st.booleans()) else []
    delays = [draw(row) for _ in range(count)] if rates and draw(st.booleans()) else []
    finite = tuple(tuple(0.0 if a == b else min(x, 9.0) for b, x in enumerate(r)) for a, r in enumerate(delays))
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3))
    pairs = st.dictionaries(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), LINKS, max_size=2)
    return Cluster(
        draw(LINKS),
        draw(pairs | st.just({})),
        draw(st.sampled_from(Duplex)),
        tuple(draw(st.sampled_from(kinds)) for _ in range(count)),
        hosts,
        tuple(tuple(0.0 if a == b else x for b, x in enumerate(r)) for a, r in enumerate(rates)),
        finite,
        draw(LINKS | st.none()),
        collective=draw(LINKS | st.just(Link())),
    )


@given(clusters())
@settings(max_examples=150, deadline=None)
def test_toml_reads_back_equal(cluster: Cluster) -> None:
    assert cluster_from_toml(cluster_to_toml(cluster)) == cluster


@given(clusters(), st.data())
@settings(max_examples=150, deadline=None)
def test_structure_says_what_all_pairs_say(cluster: Cluster, data: st.DataObject) -> None:
    devices = range(cluster.size)
    assert cluster.rates() == [[float("inf") if a == b else cluster.between(a, b).bytes_per_s for b in devices] for a in devices]
    chosen = data.draw(st.lists(st.sampled_from(devices), unique=True, min_size=1))
    others = data.draw(st.none() | st.lists(st.sampled_from(devices), unique=True))
    every = ((a, b) for a in chosen for b in (chosen if others is None else others) if a != b)
    assert cluster.slowest(chosen, others) == cluster.slowest_pair(every)
    longest = max(
        (cluster.between(a, b).latency_s + 5 / cluster.between(a, b).bytes_per_s for a, b in permutations(devices, 2)), default=0
    )
    assert cluster.hop_s([5.0, 1.0]) >= longest if cluster.links else cluster.size < 2 or cluster.hop_s([5.0]) == longest


@given(clusters(), st.data())
@settings(max_examples=100, deadline=None)
def test_placed_devices_keep_their_links(cluster: Cluster, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.sampled_from(range(cluster.size)), unique=True, min_size=1))
    found = cluster.placed(ranks)
    again = found.placed(range(len(ranks))[::-1])
    for a, b in permutations(range(len(ranks)), 2):
        assert found.between(a, b) == cluster.between(ranks[a], ranks[b]) == again.between(len(ranks) - 1 - a, len(ranks) - 1 - b)
    assert found.devices == tuple(cluster.devices[rank] for rank in ranks) and found.size == len(ranks)
    assert found.slowest(range(len(ranks))) == cluster.slowest(ranks)
    assert found.gather_s(range(len(ranks)), 24.0) == cluster.gather_s(ranks, 24.0)


def test_hosts_are_asked_not_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,072 devices have 4.7 million pairs: none is looked at."""
    cluster = read_cluster("384xdgx-h100")
    everyone = list(range(cluster.size))
    monkeypatch.setattr(Base, "between", lambda *_: pytest.fail("a pair was asked for"))
    assert cluster.slowest(everyone) == Link(15e-6, 46e9)
    assert cluster.gather_s(everyone, 1e9) > 0 and cluster.hop_s([1e6]) == 15e-6 + 1e6 / 46e9
    assert cluster.placed(everyone[::-1]).slowest(everyone[:8]) == Link(5e-6, 360e9)


INSIDE, CARD = Link(1.0, 8.0), Link(2.0, 4.0)


def test_a_ring_and_doubling() -> None:
    """p devices: p - 1 steps around a ring, log2 p steps by doubling, and the same bytes."""
    cluster = Cluster(INSIDE, devices=(Device(),) * 8)
    for count in (3, 5, 6, 7):
        assert cluster.gather_s(range(count), 24.0) == pytest.approx((count - 1) * 1.0 + (count - 1) / count * 24 / 8)
    for count, steps in ((2, 1), (4, 2), (8, 3)):
        assert cluster.gather_s(range(count), 24.0) == pytest.approx(steps * 1.0 + (count - 1) / count * 24 / 8)
    assert cluster.all_reduce_s((0, 1, 2), 24.0) == 2 * cluster.scatter_s((0, 1, 2), 24.0)
    assert cluster.all_reduce_s((4,), 24.0) == 0.0 == cluster.gather_s((0, 1), 0.0)


def test_the_slowest_link_decides() -> None:
    cluster = Cluster(INSIDE, {(0, 2): Link(3.0, 2.0)}, devices=(Device(),) * 3)
    assert cluster.gather_s((0, 1, 2), 24.0) == 2 * 3.0 + 2 / 3 * 24 / 2
    assert cluster.gather_s((0, 1), 24.0) == 1.0 + 1 / 2 * 24 / 8


def test_collectives_may_be_slower_than_links() -> None:
    """Their own latency and bandwidth hold where they are worse; messages do not change."""
    fast = Cluster(hosts=(Host(2, INSIDE, CARD),) * 2, devices=(Device(),) * 4)
    slow = replace(fast, collective=Link(1.5, 5.0))
    assert slow.gather_s((0, 1), 24.0) == 1.5 + 1 / 2 * 24 / 5 and slow.between(0, 1) == INSIDE
    assert slow.gather_s((0, 2), 24.0) == fast.gather_s((0, 2), 24.0) == 2.0 + 1 / 2 * 24 / 4
    assert slow.gather_s(range(4), 24.0) == min(2 * 2.0 + 3 / 4 * 24 / 4, (2.0 + 1 / 2 * 12 / 4) + (1.5 + 1 / 2 * 24 / 5))
    assert slow.all_reduce_s((0, 1), 24.0) == fast.all_reduce_s((0, 1), 24.0), "a pair of one host uses messages"
    assert slow.all_reduce_s((0, 1, 2), 24.0) == 2 * slow.gather_s((0, 1, 2), 24.0) > 0
    assert slow.placed((3, 0)).gather_s((0, 1), 24.0) == slow.gather_s((3, 0), 24.0)
    assert cluster_from_toml(cluster_to_toml(slow)) == slow
    with pytest.raises(MeshwrightError, match="JSON holds links, not devices, hosts, matrices or collectives"):
        cluster_to_json(Cluster(collective=Link(1.0)))


@pytest.mark.parametrize(("cards", "flows"), [(0, 1), (1, 4), (2, 2), (3, 2), (4, 1)])
def test_hosts_first(cards: int, flows: int) -> None:
    """3 hosts with 4 devices: parts over hosts, each flow with its share of a card, then inside; or one ring around all."""
    cluster = Cluster(hosts=(Host(4, INSIDE, CARD, cards),) * 3)
    size = 2400.0
    first = 2 * 2.0 + 2 / 3 * (size / 4) / (4.0 / flows)
    inside = 2 * 1.0 + 3 / 4 * size / 8
    ring = 11 * 2.0 + 11 / 12 * size / 4
    assert cluster.gather_s(range(12), size) == pytest.approx(min(first + inside, ring))
    assert cluster.gather_s((0, 1, 4), 24.0) == pytest.approx(2 * 2.0 + 2 / 3 * 24 / 4), "unequal hosts: a ring"


def test_doubling_crosses_shared_cards_at_once() -> None:
    """Two hosts of two devices with one card: doubling sends two flows through it, a ring one."""
    cluster = Cluster(hosts=(Host(2, Link(0.0, 8.0), Link(1.0, 4.0), 1),) * 2)
    doubling, ring = 2 * 1.0 + 3 / 4 * 16 / 2, 3 * 1.0 + 3 / 4 * 16 / 4
    hosts = (1.0 + 1 / 2 * 8 / 2) + 1 / 2 * 16 / 8
    assert cluster.gather_s(range(4), 16.0) == min(doubling, ring, hosts) == hosts
    assert cluster.gather_s((0, 1, 2, 3), 0.01) < 2 * 1.0 + 0.01


def test_racks() -> None:
    cluster = Cluster(hosts=tuple(Host(1, INSIDE, CARD, rack=rack) for rack in (0, 0, 1)), spine=Link(5.0, 1.0))
    assert cluster.between(0, 1) == CARD and cluster.between(1, 2) == Link(5.0, 1.0)
    assert cluster.slowest((0, 1)) == CARD and cluster.slowest((0,), (2,)) == Link(5.0, 1.0)
    nodes = "[[nodes]]\ncount = 5\nper_node = 1\ndevice = 'a'\nper_rack = 2\nrack = 1"
    text = f"schema = 1\nracks = {{latency_s = 5}}\n[device.a]\n{nodes}"
    assert [host.rack for host in cluster_from_toml(text).hosts] == [1, 1, 2, 2, 3]


def test_a_shared_card_is_divided_by_the_pairs_that_cross_it() -> None:
    """Two hosts of four devices with two cards each: devices 0, 1 share a card, and 2, 3."""
    cluster = Cluster(hosts=(Host(4, INSIDE, CARD, 2),) * 2)
    found = cluster.shared([(0, 4), (1, 5), (2, 6), (0, 1), (4, 0)])
    assert found.between(0, 4) == found.between(1, 5) == Link(2.0, 2.0), "two pairs leave through card 0"
    assert found.between(2, 6) == found.between(4, 0) == CARD, "one pair each way"
    assert found.between(0, 1) == INSIDE and found.between(3, 7) == CARD, "other pairs stay"
    three = cluster.shared([(0, 4), (2, 5), (3, 4)])
    assert three.between(0, 4).bytes_per_s == 4 / 3, "three pairs arrive through one card"
    half = Cluster(hosts=cluster.hosts, duplex=Duplex.HALF).shared([(0, 4), (4, 0)])
    assert half.between(0, 4) == half.between(4, 0) == Link(2.0, 2.0), "both directions share a card"
    plain = Cluster(hosts=(Host(4, INSIDE, CARD),) * 2)
    assert plain.shared([(0, 4), (1, 5)]) is plain, "cards that are not shared"
    moved = cluster.placed((4, 0, 5, 1)).shared([(1, 0), (3, 2)])
    assert moved.between(1, 0) == moved.between(3, 2) == Link(2.0, 2.0)


def test_cards_of_one_host_divide_nothing_inside() -> None:
    cluster = Cluster(hosts=(Host(4, INSIDE, CARD, 1),))
    assert all(cluster.shared(combinations(range(4), 2)).between(a, b) == INSIDE for a, b in combinations(range(4), 2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hosts": (Host(2, INSIDE, CARD),), "devices": (Device(),)}, "2 devices in its links, and 1 in its devices"),
        ({"bandwidths": ((0.0, 1.0),)}, "square matrix, got 1 rows"),
        ({"bandwidths": ((0.0, 1.0), (0.0, 0.0))}, "must be above 0"),
        ({"bandwidths": ((0.0, 1.0), (1.0, 0.0)), "latencies": ((0.0,),)}, "'latencies' of a cluster must be a square"),
        ({"hosts": (Host(2, INSIDE, CARD),), "order": (0, 0)}, "different devices below 2"),
        ({"hosts": (Host(2, INSIDE, CARD),), "order": (0, 1), "devices": (Device(),)}, "orders 2 devices and describes 1"),
    ],
)
def test_parts_that_do_not_fit(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(MeshwrightError, match=said):
        Cluster(**wrong)  # type: ignore[arg-type]


def test_bad_devices_and_hosts() -> None:
    with pytest.raises(MeshwrightError, match=r"not above 0: {'fp32': 0\.0}"):
        Device("a", flops_per_s={"fp32": 0.0})
    with pytest.raises(MeshwrightError, match="launch time of -1"):
        Device("a", launch_s=-1.0)
    with pytest.raises(MeshwrightError, match="0 devices, 1 cards"):
        Host(0, INSIDE, CARD, 1)


def test_what_cannot_be_written_is_refused() -> None:
    cluster = Cluster(hosts=(Host(2, INSIDE, CARD),), devices=(Device(), Device()))
    with pytest.raises(MeshwrightError, match="placed"):
        cluster_to_toml(cluster.placed((1, 0)))
    with pytest.raises(MeshwrightError, match="precision 'int3'"):
        cluster_to_toml(Cluster(devices=(Device(flops_per_s={"int3": 1.0}),)))
    with pytest.raises(MeshwrightError, match="hosts without devices"):
        cluster_to_toml(Cluster(hosts=cluster.hosts))


@pytest.mark.parametrize("name", preset_names())
def test_presets(name: str) -> None:
    """Each reads back, says where each number comes from, and can be multiplied."""
    cluster = read_cluster(name)
    assert cluster_from_toml(cluster_to_toml(cluster)) == cluster
    assert all(device.memory_bytes < 1e12 and device.flops_per_s["fp32"] > 0 for device in cluster.devices)
    for line in preset_text(name).splitlines():
        if (
            any(character.isdigit() for character in line.partition("#")[0])
            and '"' in line
            and not line.startswith(("[", "device"))
        ):
            assert "#" in line, line
    three = read_cluster(f"3x{name}")
    assert three == read_cluster(f"{name}x3") and three.size == 3 * cluster.size and len(three.hosts) == 3 * len(cluster.hosts)


def test_the_mixed_preset_keeps_kinds_together() -> None:
    kinds = [device.kind for device in read_cluster("2xa100-v100-ethernet").devices]
    assert kinds == ["a100"] * 8 + ["v100"] * 8


def test_names_that_are_no_preset() -> None:
    for name, said in (("dgx-a10", "did you mean dgx-a100"), ("2xlaptopx3", "two counts"), ("0xlaptop", "0 devices")):
        with pytest.raises(MeshwrightError, match=said):
            read_cluster(name)
    for name, fix in (("0xdgx-a100", "dgx-a100"), ("999999xdgx-a100", "12500xdgx-a100")):
        with pytest.raises(MeshwrightError, match="possible are 1 to") as caught:
            read_cluster(name)
        assert caught.value.fix == fix


def test_a_file_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("laptop").write_text('{"bytes_per_s": [[0, 5.0], [5.0, 0]]}')
    assert read_cluster("laptop").size == 2


def test_presets_are_in_the_package() -> None:
    assert len(preset_names()) == 6 and "presets/**/*.toml" in (ROOT / "pyproject.toml").read_text()
