"""Other file forms of a cluster than the one of `ir/cluster.py`: hosts in TOML, and a matrix of bandwidths in JSON.

schema = 1                                      {"memory_bytes": [16e9, 16e9],
[device.a100]                                    "bytes_per_s": [[0, 1e9], [1e9, 0]],
memory = "80 GB"                                 "latency_s": 1e-5}
bf16 = 312e12
[[nodes]]
count = 8
per_node = 8
device = "a100"
inside = {latency_s = 5e-6, bytes_per_s = 250e9}
card = {latency_s = 2e-5, bytes_per_s = 25e9}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.byte_sizes import bytes_in
from meshwright.ir.cluster import Cluster, Device, Host, Link, cluster_from_json, link_from
from meshwright.ir.input_limits import file_text, shown, toml
from meshwright.ir.reader import Reader, number, parsed, positive, rows
from meshwright.ir.reader import text as as_text

SCHEMA = 1
WHAT = "a cluster file"
DEVICES = 100_000
"""The most devices of a cluster."""


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a file.

    Args:
        path: A TOML file with hosts, or a JSON file with links or with a matrix.

    Returns:
        The cluster.

    Raises:
        MeshwrightError: The file cannot be read, or is not a cluster.

    Examples:
        >>> import meshwright as mw, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.json"
        >>> _ = path.write_text('{"bytes_per_s": [[0, 5.0], [5.0, 0]]}')
        >>> mw.read_cluster(path).between(0, 1).bytes_per_s
        5.0
    """
    path = Path(path)
    content = file_text(path, "the cluster", fix="a TOML or JSON file; see the documentation of clusters")
    return cluster_from_toml(content) if path.suffix == ".toml" else cluster_from_text(content)


def cluster_from_text(text: str) -> Cluster:
    """Returns the cluster of a JSON file: links by pair, or a matrix of bandwidths."""
    data = parsed(text, WHAT)
    return _matrix(data) if isinstance(data, Mapping) and "bytes_per_s" in data else cluster_from_json(text)


def _matrix(data: Mapping[str, Any]) -> Cluster:
    read = Reader(data, WHAT, kind=None, schema=SCHEMA, keys=frozenset({"schema", "memory_bytes", "bytes_per_s", "latency_s"}))
    rates = read("bytes_per_s", lambda value: tuple(tuple(map(number, rows(row))) for row in rows(value)))
    count = len(rates)
    if not 1 <= count <= DEVICES or any(len(row) != count for row in rates):
        raise MeshwrightError(f"'bytes_per_s' of {WHAT} must be a square matrix, got {count} rows", fix="one row for each device")
    if any(rate <= 0 for a, row in enumerate(rates) for b, rate in enumerate(row) if a != b):
        raise MeshwrightError(
            f"'bytes_per_s' of {WHAT} must be above 0 between two devices", fix="a small number for a slow link"
        )
    memory = read("memory_bytes", lambda value: tuple(map(number, rows(value))), ())
    if memory and len(memory) != count:
        raise MeshwrightError(f"{WHAT} has {count} devices and the memory of {len(memory)}", fix="one number for each device")
    devices = tuple(Device(memory_bytes=size) for size in memory) or (Device(),) * count
    return Cluster(Link(read("latency_s", number, 0.0)), devices=devices, bandwidths=rates)


def cluster_from_toml(text: str) -> Cluster:
    """Returns the cluster of a TOML file with devices and hosts."""
    data = toml(text, WHAT)
    read = Reader(data, WHAT, kind=None, schema=SCHEMA, keys=frozenset({"schema", "device", "nodes"}))
    if "schema" not in data:
        raise MeshwrightError(f"{WHAT} has no 'schema'", fix=f"schema = {SCHEMA}")
    kinds = read("device", lambda value: {name: _device(name, row) for name, row in _table(value).items()}, {})
    found = [_hosts(row, kinds) for row in read("nodes", rows)]
    devices = tuple(device for device, count, hosts in found for _ in range(count * len(hosts)))
    if not 1 <= len(devices) <= DEVICES:
        raise MeshwrightError(
            f"{WHAT} has {len(devices)} devices, it needs 1 to {DEVICES}", fix="[[nodes]] with count and per_node"
        )
    return Cluster(devices=devices, hosts=tuple(host for _, _, hosts in found for host in hosts))


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MeshwrightError(f"{shown(value)} is not a table")
    return value


def _device(name: str, row: Any) -> Device:
    speeds = {key: number(value) for key, value in _table(row).items() if key != "memory"}
    return Device(name, _size(row["memory"]) if "memory" in row else float("inf"), speeds)


def _size(value: Any) -> float:
    found = bytes_in(value) if isinstance(value, str) else number(value)
    if found is None:
        raise MeshwrightError(f"{shown(value)} is not a size", fix='memory = "80 GB"')
    return found


def _hosts(row: Any, kinds: Mapping[str, Device]) -> tuple[Device, int, list[Host]]:
    """Returns the kind of device, how many of them a host has, and the hosts."""
    keys = frozenset({"count", "per_node", "device", "inside", "card"})
    read = Reader(row, "a group of nodes", kind=None, schema=SCHEMA, keys=keys)
    count, each = read("count", positive, 1), read("per_node", positive)
    if count * each > DEVICES:
        raise MeshwrightError(f"{WHAT} has {count} x {each} devices, the limit is {DEVICES}")
    name = read("device", as_text)
    if name not in kinds:
        raise MeshwrightError(
            f"a group of nodes has the device {shown(name)}, which is not described", fix=f"[device.{name}]"[:80]
        )
    inside = read("inside", link_from, Link())
    return kinds[name], each, [Host(each, inside, read("card", link_from, inside))] * count
