"""Find and read a cluster: a preset by name, a TOML file, or a JSON file with links or a matrix of bandwidths.

read_cluster("dgx-a100")         a preset: a file in meshwright/presets/clusters
read_cluster("8xdgx-a100")       eight of it
read_cluster("cluster.toml")     devices and nodes
read_cluster("cluster.json")     {"memory_bytes": [16e9, 16e9], "bytes_per_s": [[0, 1e9], [1e9, 0]], "latency_s": 1e-5}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ir.cluster import Cluster, Device, Host, Link
from meshwright.ir.files.cluster_json import cluster_from_json
from meshwright.ir.files.cluster_toml import DEVICES, SCHEMA, WHAT, cluster_from_toml, matrix
from meshwright.ir.input_limits import file_text
from meshwright.ir.reader import Reader, number, parsed, rows

_COUNTED = re.compile(r"(?:(\d{1,6})x)?([a-z].*?)(?:x(\d{1,6}))?")


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a file, or by the name of a preset.

    Args:
        path: A TOML file with nodes, a JSON file with links or with a matrix, or a preset: `dgx-a100`, or `8xdgx-a100` (also
            `dgx-a100x8`) for eight of them.

    Returns:
        The cluster.

    Raises:
        MeshwrightError: The file cannot be read, is not a cluster, or there is no such preset.

    Examples:
        >>> import meshwright as mw, tempfile, pathlib
        >>> mw.read_cluster("8xdgx-a100").size
        64
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.json"
        >>> _ = path.write_text('{"bytes_per_s": [[0, 5.0], [5.0, 0]]}')
        >>> mw.read_cluster(path).between(0, 1).bytes_per_s
        5.0
    """
    path = Path(path)
    if not path.suffix and len(path.parts) == 1 and not os.path.exists(path):
        return _preset(path.name)
    content = file_text(path, "the cluster", fix=f"a TOML or JSON file, or one of {', '.join(preset_names())}")
    return cluster_from_toml(content) if path.suffix == ".toml" else cluster_from_text(content)


def preset_names() -> list[str]:
    """Returns the names of the clusters that come with the package, sorted."""
    files = resources.files("meshwright.presets").joinpath("clusters").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """Returns the file of a preset."""
    if name not in preset_names():
        known = preset_names()
        raise MeshwrightError(
            f"there is no cluster file or preset '{name[:80]}'{did_you_mean(name, known)}", fix=f"one of {', '.join(known)}"
        )
    return resources.files("meshwright.presets").joinpath("clusters", f"{name}.toml").read_text(encoding="utf-8")


def _preset(name: str) -> Cluster:
    times, plain = 1, name
    if name not in preset_names() and (found := _COUNTED.fullmatch(name)):
        before, plain, after = found.groups()
        if before and after:
            raise MeshwrightError(f"the cluster '{name[:80]}' has two counts, {before} and {after}", fix=f"{before}x{plain}"[:80])
        times = int(before or after or 1)
    cluster = cluster_from_toml(preset_text(plain))
    if not 1 <= times * cluster.size <= DEVICES:
        raise MeshwrightError(
            f"{times} x {plain} are {times * cluster.size} devices, possible are 1 to {DEVICES}",
            fix=f"{DEVICES // cluster.size}x{plain}" if times else plain,
        )
    if times == 1:
        return cluster
    own = [(host, cluster.devices[start : start + host.devices]) for host, start in _starts(cluster)]
    hosts = tuple(host for host, _ in own for _ in range(times))
    return replace(cluster, hosts=hosts, devices=tuple(device for _, devices in own for device in devices * times))


def _starts(cluster: Cluster) -> list[tuple[Host, int]]:
    """Returns each host with the number of its first device."""
    ends = accumulate(host.devices for host in cluster.hosts)
    return [(host, end - host.devices) for host, end in zip(cluster.hosts, ends, strict=True)]


def cluster_from_text(text: str) -> Cluster:
    """Returns the cluster of a JSON file: links by pair, or a matrix of bandwidths."""
    data = parsed(text, WHAT)
    return _matrix(data) if isinstance(data, Mapping) and "bytes_per_s" in data else cluster_from_json(text)


def _matrix(data: Mapping[str, Any]) -> Cluster:
    read = Reader(data, WHAT, kind=None, schema=SCHEMA, keys=frozenset({"schema", "memory_bytes", "bytes_per_s", "latency_s"}))
    rates = read("bytes_per_s", lambda value: matrix(value, least=0.0))
    memory = read("memory_bytes", lambda value: tuple(map(number, rows(value))), ())
    if memory and len(memory) != len(rates):
        raise MeshwrightError(f"{WHAT} has {len(rates)} devices and the memory of {len(memory)}", fix="one for each device")
    devices = tuple(Device(memory_bytes=size) for size in memory) or (Device(),) * len(rates)
    several = isinstance(data.get("latency_s"), list)
    latency = 0.0 if several else read("latency_s", number, 0.0)
    return Cluster(Link(latency), devices=devices, bandwidths=rates, latencies=read("latency_s", matrix) if several else ())
