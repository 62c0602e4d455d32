"""Clusters and profiles in their file forms: what is read, how long collectives take, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import Cluster, Device, Host, Link, MeshwrightError, profile_from_text, read_cluster
from tests.support.fuzzing import CLUSTER_TOML, MATRIX, NUMBERS


def written(folder: Path, name: str, content: bytes) -> Cluster:
    (folder / name).write_bytes(content)
    return read_cluster(folder / name)


def test_hosts_in_toml(tmp_path: Path) -> None:
    found = written(tmp_path, "cluster.toml", CLUSTER_TOML)
    assert found.size == 8 and found.host_of == (0,) * 4 + (1,) * 4
    assert found.devices[5] == Device("a100", 80e9, {"bf16": 312e12, "fp32": 17e12}, 1.5e12, 2e-5)
    assert found.between(1, 3) == Link(5e-6, 250e9) and found.between(1, 4) == found.between(4, 1) == Link(2e-5, 25e9)
    assert found.between(7, 0) == Link(0.0, 1e9) and found.hosts[1].cards == 2 and found.spine == Link(5e-5)


def test_a_matrix_in_json(tmp_path: Path) -> None:
    found = written(tmp_path, "cluster.json", MATRIX)
    assert found.size == 3 and found.devices[2].memory_bytes == 3e9
    assert found.between(0, 1) == Link(1e-5, 1.5) and found.between(1, 0) == Link(1e-5, 1.0)
    assert found.hop_s([3.0]) == pytest.approx(1e-5 + 3.0)
    assert found.slowest((0, 1)).bytes_per_s == 1.0 and found.slowest((0,), (1, 2)).bytes_per_s == 1.5


def test_one_latency_for_a_matrix_in_toml(tmp_path: Path) -> None:
    """As in JSON: a number is the latency of all pairs."""
    rates = "schema = 1\nbytes_per_s = [[0, 5.0], [4.0, 0]]\n"
    for written_as in ("1e-5", '"10 us"'):
        (tmp_path / "c.toml").write_text(f"{rates}latency_s = {written_as}\n")
        assert read_cluster(tmp_path / "c.toml").between(0, 1) == Link(1e-5, 5.0)
    for content, said in ((f"{rates}link = {{}}\n", "it has also a link"), ("schema = 1\nlink = {}\n", "it has also a link")):
        (tmp_path / "c.toml").write_text(f"latency_s = 1e-5\n{content}")
        with pytest.raises(MeshwrightError, match=said):
            read_cluster(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text('schema = 1\nlatency_s = 1e-5\ndevices = ["a"]\n[device.a]\n')
    with pytest.raises(MeshwrightError, match="it has no matrix"):
        read_cluster(tmp_path / "c.toml")


@pytest.mark.parametrize("own", ["null", "-1", '"-"', "Infinity", "0"])
def test_the_diagonal_of_a_matrix_is_ignored(tmp_path: Path, own: str) -> None:
    (tmp_path / "c.json").write_text(
        f'{{"bytes_per_s": [[{own}, 5.0], [4.0, {own}]], "latency_s": [[{own}, 0.1], [0.2, {own}]]}}'
    )
    (tmp_path / "zero.json").write_text('{"bytes_per_s": [[0, 5.0], [4.0, 0]], "latency_s": [[0, 0.1], [0.2, 0]]}')
    assert read_cluster(tmp_path / "c.json") == read_cluster(tmp_path / "zero.json")


def test_links_by_pair_are_still_read(tmp_path: Path) -> None:
    assert written(tmp_path, "c.json", b'{"schema": 1, "kind": "cluster", "link": {"latency_s": 0.5}}').link == Link(0.5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"bytes_per_s": [[0, 1], [1]]}', "square matrix, got 2 rows"),
        (b'{"bytes_per_s": [[0, 0], [1, 0]]}', "above 0 between two devices"),
        (b'{"bytes_per_s": [[0]], "memory_bytes": [1, 2]}', "1 devices and the memory of 2"),
        (b'{"bytes_per_s": [[0]], "memory": 3}', "unknown keys: memory"),
    ],
)
def test_a_bad_matrix(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(MeshwrightError, match=said.replace("[", r"\[")):
        written(tmp_path, "c.json", content)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"schema = 1\n", b"", "has no 'schema'"),
        (b'device = "a100"', b'device = "h100"', "not described"),
        (b"per_node = 4", b"per_node = 0", "not at least 1"),
        (b"count = 2", b"count = 900000", "the limit is 100000"),
        (b'"80 GB"', b'"80 apples"', "not a size"),
        (b'"17 TFLOPS"', b'"17 TB"', "not a speed"),
        (b'"20 us"', b'"20"', "not a time"),
        (b'"8 Gbit/s"', b'"8 Gb/s"', "not a rate"),
        (b"bf16 =", b"bf61 =", "unknown key 'bf61'; did you mean bf16"),
        (b"312e12", b"0", "not above 0"),
        (b"latency_s = 5e-6", b"latency_s = 5e-6, latency = 1", "both 'latency' and 'latency_s'"),
        (b'"a100"\n', b'["a100", "a100"]\n', "a node has 4 devices, and 2 names"),
        (b"per_node = 2", b"per_node = 0", "not at least 1"),
        (b"[[nodes]]", b"[[node]]", "unknown keys: node"),
    ],
)
def test_bad_hosts(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    with pytest.raises(MeshwrightError, match=said):
        written(tmp_path, "c.toml", CLUSTER_TOML.replace(old, new))


def test_more_workers_than_devices() -> None:
    with pytest.raises(MeshwrightError, match="no device 2 in a cluster of 2 devices"):
        Cluster(hosts=(Host(2, Link(), Link()),)).between(0, 2)


def test_a_cut_carries_each_tensor_once() -> None:
    """a is read by b and d, b by c: between c and d only a crosses, and between b and c both, each once."""
    lines = [
        f"{name} -- op {name} -- {NUMBERS.replace('=8', f'={size}')}" for name, size in zip("abcd", (8, 16, 32, 64), strict=True)
    ]
    edges = ["a -- b", "a -- d", "b -- c", "c -- d", "a -- d"]
    found = profile_from_text("\n".join([*lines, *edges]))
    assert [layer.output_bytes for layer in found.layers] == [8.0, 24.0, 40.0, 0.0]
    assert [layer.name for layer in found.layers] == ["op a", "op b", "op c", "op d"]
    assert found.layers[0].forward_s == (1.5e-3,) and found.layers[0].backward_s == (3e-3,)


def test_operations_are_put_in_order() -> None:
    found = profile_from_text(f"b -- second -- {NUMBERS}\na -- first -- {NUMBERS}\na -- b")
    assert [layer.name for layer in found.layers] == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("what is this", "line 1 of the profile is neither"),
        ("a -- b -- forward_compute_time=x", "is not a number"),
        ("a -- b -- forward_compute_time=1", "needs a number of at least 0 for backward_compute_time"),
        (f"a -- b -- {NUMBERS}\na -- c", "names 'c', which is no operation"),
        (f"a -- b -- {NUMBERS}\na -- c -- {NUMBERS}", "a second time"),
        (f"a -- x -- {NUMBERS}\nb -- y -- {NUMBERS}", "2 operations and no edges"),
        (f"a -- x -- {NUMBERS}\nb -- y -- {NUMBERS}\na -- b\nb -- a", "form a cycle"),
        ("", "at least one layer"),
    ],
)
def test_bad_profiles(text: str, said: str) -> None:
    with pytest.raises(MeshwrightError, match=said):
        profile_from_text(text)
