"""Read a cluster from TOML: kinds of devices, groups of equal nodes, and links or matrices where pairs differ.

    schema = 1
    [device.a100]
    memory = "80 GB"
    bf16 = "240 TFLOPS"                                 # achieved; or 240e12
    reads = "1.6 TB/s"
    [[nodes]]
    count = 8
    per_node = 8
    device = "a100"
    inside = {latency = "5 us", bandwidth = "250 GB/s"}
    card = {latency_s = 2e-5, bytes_per_s = 25e9, per_node = 4}

Every number may be a text with a unit. Unknown keys, precisions and units are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ir.byte_sizes import bytes_in, flops_in, rate_in, seconds_in
from meshwright.ir.cluster import Cluster, Device, Duplex, Host, Link
from meshwright.ir.input_limits import shown, toml
from meshwright.ir.reader import Reader, count, number, positive, rows, table
from meshwright.ir.reader import text as as_text

SCHEMA = 1
WHAT = "a cluster file"
DEVICES = 100_000
"""The most devices of a cluster."""
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""The precisions that a device may have a speed for."""

_KEYS = frozenset(
    {"schema", "device", "nodes", "devices", "link", "links", "duplex", "racks", "bytes_per_s", "latency_s", "collectives"}
)
_LINK = frozenset({"latency", "latency_s", "bandwidth", "bytes_per_s"})


def cluster_from_toml(text: str) -> Cluster:
    """Read a cluster from TOML.

    Args:
        text: The TOML text.

    Returns:
        The cluster.

    Raises:
        MeshwrightError: The text is not a cluster, or a number in it is not possible.

    Examples:
        >>> import meshwright as mw
        >>> text = '''
        ... schema = 1
        ... device.cpu = {memory = "8 GB", fp32 = "50 GFLOPS"}
        ... [[nodes]]
        ... per_node = 2
        ... device = "cpu"
        ... inside = {bandwidth = "4 GB/s"}
        ... '''
        >>> mw.cluster_from_toml(text).between(0, 1).bytes_per_s
        4000000000.0
    """
    data = toml(text, WHAT)
    read = Reader(data, WHAT, kind=None, schema=SCHEMA, keys=_KEYS)
    if "schema" not in data:
        raise MeshwrightError(f"{WHAT} has no 'schema'", fix=f"schema = {SCHEMA}")
    kinds = read("device", lambda value: {name: _device(name, row) for name, row in table(value).items()}, {})
    found = [_hosts(row, kinds) for row in read("nodes", rows, [])]
    named = read("devices", lambda value: _devices(rows(value), kinds), ())
    devices = tuple(device for each, hosts in found for _ in hosts for device in each) or named
    if not len(devices) <= DEVICES or (not devices and "link" not in data and "bytes_per_s" not in data):
        raise MeshwrightError(
            f"{WHAT} has {len(devices)} devices, it needs 1 to {DEVICES}", fix="[[nodes]] with count and per_node"
        )
    if named and found:
        raise MeshwrightError(f"{WHAT} has both 'devices' and '[[nodes]]'", fix="one of the two")
    bandwidths = read("bytes_per_s", lambda value: matrix(value, least=0.0), ())
    every_s = None if isinstance(data.get("latency_s", []), list) else read("latency_s", seconds)
    if every_s is not None and ("link" in data or not bandwidths):
        raise MeshwrightError(
            f"the number 'latency_s' of {WHAT} is for all pairs of the matrix 'bytes_per_s'; it has "
            f"{'also a link' if 'link' in data else 'no matrix'}",
            fix="link = {latency_s = 1e-5, bytes_per_s = 1e9}, or a matrix and no link",
        )
    return Cluster(
        read("link", link_from, Link()) if every_s is None else Link(every_s),
        read("links", lambda value: dict(map(_pair, rows(value))), {}),
        read("duplex", lambda value: Duplex(as_text(value)), Duplex.FULL),
        devices or (Device(),) * len(bandwidths),
        tuple(host for _, hosts in found for host in hosts),
        bandwidths,
        read("latency_s", matrix, ()) if every_s is None else (),
        read("racks", link_from, None),
        collective=read("collectives", link_from, Link()),
    )


def measure(what: str, convert: Callable[[str], float | None], example: str) -> Callable[[Any], float]:
    """Returns a reader of a number, or of a text with a unit."""

    def read(value: Any) -> float:
        found = convert(value) if isinstance(value, str) else number(value)
        if found is None:
            raise MeshwrightError(f"{shown(value)} is not a {what}", fix=f'a number, or a text such as "{example}"')
        return found

    return read


size, speed = measure("size", bytes_in, "80 GB"), measure("speed", flops_in, "312 TFLOPS")
rate, seconds = measure("rate", rate_in, "25 GB/s, 200 Gbit/s"), measure("time", seconds_in, "5 us")


def link_from(row: Any, more: frozenset[str] = frozenset()) -> Link:
    """Returns the link of a table."""
    read = Reader(row, "a link", kind=None, schema=SCHEMA, keys=_LINK | more)
    for one, other in (("latency", "latency_s"), ("bandwidth", "bytes_per_s")):
        if one in row and other in row:
            raise MeshwrightError(f"a link has both '{one}' and '{other}'", fix="one of the two")
    latency = read("latency", seconds, read("latency_s", seconds, 0.0))
    return Link(latency, read("bandwidth", rate, read("bytes_per_s", rate, float("inf"))))


def matrix(value: Any, least: float = -1.0) -> tuple[tuple[float, ...], ...]:
    """Returns a square matrix of numbers above `least`. Infinite ones are allowed; the diagonal is ignored and becomes 0."""

    def rate_of(one: Any) -> float:
        return one if one == float("inf") else number(one)

    given = (enumerate(rows(row)) for row in rows(value))
    found = tuple(tuple(0.0 if a == b else rate_of(one) for b, one in row) for a, row in enumerate(given))
    if not found:
        raise MeshwrightError("it has no rows: a cluster needs at least one device", fix="one row for each device")
    if len(found) > DEVICES or any(len(row) != len(found) for row in found):
        raise MeshwrightError(f"it must be a square matrix, got {len(found)} rows", fix="one row for each device")
    if any(one <= least for a, row in enumerate(found) for b, one in enumerate(row) if a != b):
        raise MeshwrightError(f"it must be above {least:g} between two devices", fix="a small number for a slow link")
    return found


def _pair(row: Any) -> tuple[tuple[int, int], Link]:
    ends = frozenset({"source", "target"})
    read = Reader(row, "a link", kind=None, schema=SCHEMA, keys=_LINK | ends)
    return (read("source", count), read("target", count)), link_from(row, ends)


def _device(name: str, row: Any) -> Device:
    own = ("kind", "memory", "reads", "launch")
    for key in table(row):
        if key not in (*own, *PRECISIONS):
            raise MeshwrightError(
                f"the device {shown(name)} has the unknown key {shown(key)}{did_you_mean(key, (*own, *PRECISIONS))}",
                fix=f"keys: {', '.join((*own, *PRECISIONS))}",
            )
    read = Reader(row, f"the device {shown(name)}", kind=None, schema=SCHEMA, keys=frozenset(row))
    return Device(
        read("kind", as_text, name),
        read("memory", size, float("inf")),
        {key: read(key, speed) for key in row if key in PRECISIONS},
        read("reads", rate, float("inf")),
        read("launch", seconds, 0.0),
    )


def _devices(names: list[Any], kinds: Mapping[str, Device]) -> tuple[Device, ...]:
    for name in names:
        if as_text(name) not in kinds:
            raise MeshwrightError(f"the device {shown(name)} is not described", fix=f"[device.{name}]"[:80])
    return tuple(kinds[name] for name in names)


def _hosts(row: Any, kinds: Mapping[str, Device]) -> tuple[tuple[Device, ...], list[Host]]:
    """Returns the devices of one host of a group, and the hosts."""
    keys = frozenset({"count", "per_node", "device", "inside", "card", "rack", "per_rack"})
    read = Reader(row, "a group of nodes", kind=None, schema=SCHEMA, keys=keys)
    hosts, each = read("count", positive, 1), read("per_node", positive)
    if hosts * each > DEVICES:
        raise MeshwrightError(f"{WHAT} has {hosts} x {each} devices, the limit is {DEVICES}")
    devices = read("device", lambda value: _devices(value if isinstance(value, list) else [value] * each, kinds))
    if len(devices) != each:
        raise MeshwrightError(f"a node has {each} devices, and {len(devices)} names in 'device'", fix="one name, or one for each")
    inside = read("inside", link_from, Link())
    card, cards = read("card", _card, (inside, 0))
    first, per_rack = read("rack", count, 0), read("per_rack", positive, hosts)
    return devices, [Host(each, inside, card, cards, first + number // per_rack) for number in range(hosts)]


def _card(row: Any) -> tuple[Link, int]:
    found = link_from(row, frozenset({"per_node"}))
    return found, positive(row["per_node"]) if "per_node" in row else 0
