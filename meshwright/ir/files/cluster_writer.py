"""Write a cluster as TOML: groups of equal nodes, or matrices. Reading it back gives an equal cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Device, Duplex, Host, Link
from meshwright.ir.files.cluster_toml import PRECISIONS, SCHEMA


def cluster_to_toml(cluster: Cluster) -> str:
    """Write a cluster as TOML.

    Args:
        cluster: The cluster to write.

    Returns:
        TOML text. Equal hosts that follow each other are one group.

    Raises:
        MeshwrightError: The cluster was made by `placed`, or has a precision that the file cannot name.

    Examples:
        >>> import meshwright as mw
        >>> host = mw.Host(2, mw.Link(1e-6, 1e10), mw.Link(1e-5, 1e9))
        >>> cluster = mw.Cluster(hosts=(host,) * 4, devices=(mw.Device("cpu", 8e9),) * 8)
        >>> mw.cluster_from_toml(mw.cluster_to_toml(cluster)) == cluster
        True
    """
    if cluster.order:
        raise MeshwrightError("a cluster whose devices were placed cannot be written", fix="write the cluster before placed()")
    if cluster.hosts and not cluster.devices:
        raise MeshwrightError("hosts without devices cannot be written", fix="Cluster(devices=...)")
    names = _names(cluster.devices)
    lines = [f"schema = {SCHEMA}"]
    if cluster.duplex is not Duplex.FULL:
        lines.append(f"duplex = {_text(cluster.duplex.value)}")
    if cluster.link != Link() or not (cluster.devices or cluster.bandwidths):
        lines.append(f"link = {_link(cluster.link)}")
    if cluster.spine is not None:
        lines.append(f"racks = {_link(cluster.spine)}")
    if cluster.collective != Link():
        lines.append(f"collectives = {_link(cluster.collective)}")
    if cluster.devices and not cluster.hosts:
        lines.append(f"devices = [{', '.join(_text(names[_key(device)]) for device in cluster.devices)}]")
    for key, matrix in (("bytes_per_s", cluster.bandwidths), ("latency_s", cluster.latencies)):
        if matrix:
            lines += [f"{key} = [", *(f"    [{', '.join(_cells(place, row))}]," for place, row in enumerate(matrix)), "]"]
    for device in {names[_key(device)]: device for device in cluster.devices}.values():
        lines += _device(device, names[_key(device)])
    for group in _groups(cluster.hosts, cluster.devices):
        lines += _nodes(group, names)
    for (source, target), link in cluster.links.items():
        lines += ["", "[[links]]", f"source = {source}", f"target = {target}", *_link_lines(link)]
    return "\n".join(lines) + "\n"


_Key = tuple[str, float, tuple[tuple[str, float], ...], float, float]
_Node = tuple[Host, tuple[_Key, ...]]


def _key(device: Device) -> _Key:
    return device.kind, device.memory_bytes, tuple(device.flops_per_s.items()), device.bytes_per_s, device.launch_s


def _names(devices: Iterable[Device]) -> dict[_Key, str]:
    """Returns a name for each different device: its kind, with a number where kinds differ in more than their name."""
    found: dict[_Key, str] = {}
    for device in devices:
        if (key := _key(device)) not in found:
            name, number = device.kind, 1
            while name in found.values():
                name, number = f"{device.kind}-{number + 1}", number + 1
            found[key] = name
    return found


def _groups(hosts: Sequence[Host], devices: Sequence[Device]) -> list[tuple[_Node, int, int]]:
    """Returns runs of equal hosts with their first rack: node, hosts per rack, number of racks that follow each other."""
    nodes: list[_Node] = []
    start = 0
    for host in hosts:
        nodes.append((host, tuple(map(_key, devices[start : start + host.devices]))))
        start += host.devices
    runs = [(node, len(list(same))) for node, same in groupby(nodes)]
    found: list[tuple[_Node, int, int]] = []
    for (host, kinds), length in runs:
        if found:
            (before, others), per_rack, racks = found[-1]
            moved = Host(before.devices, before.inside, before.card, before.cards, before.rack + racks)
            if (moved, others, per_rack) == (host, kinds, length):
                found[-1] = (before, others), per_rack, racks + 1
                continue
        found.append(((host, kinds), length, 1))
    return found


def _nodes(group: tuple[_Node, int, int], names: dict[_Key, str]) -> list[str]:
    (host, kinds), per_rack, racks = group
    used = [names[kind] for kind in kinds]
    device = _text(used[0]) if len(set(used)) == 1 else f"[{', '.join(map(_text, used))}]"
    cards = f"per_node = {host.cards}" if host.cards else ""
    return [
        "",
        "[[nodes]]",
        f"count = {per_rack * racks}",
        f"per_node = {host.devices}",
        f"device = {device}",
        f"inside = {_link(host.inside)}",
        f"card = {_link(host.card, cards)}",
        *([f"rack = {host.rack}"] if host.rack else []),
        *([f"per_rack = {per_rack}"] if racks > 1 else []),
    ]


def _device(device: Device, name: str) -> list[str]:
    if unknown := set(device.flops_per_s) - set(PRECISIONS):
        raise MeshwrightError(
            f"a cluster file cannot name the precision {sorted(unknown)[0]!r}", fix=f"one of {', '.join(PRECISIONS)}"
        )
    plain = name.replace("-", "").replace("_", "")
    lines = ["", f"[device.{name if plain.isalnum() and plain.isascii() else _text(name)}]"]
    if name != device.kind:
        lines.append(f"kind = {_text(device.kind)}")
    if device.memory_bytes != float("inf"):
        lines.append(f"memory = {_size(device.memory_bytes)}")
    lines += [f"{precision} = {speed!r}" for precision, speed in device.flops_per_s.items()]
    if device.bytes_per_s != float("inf"):
        lines.append(f"reads = {device.bytes_per_s!r}")
    return [*lines, *([f"launch = {device.launch_s!r}"] if device.launch_s else [])]


def _size(size: float) -> str:
    """A whole number of gigabytes as a text, else the exact number of bytes."""
    return f'"{size / 1e9:.0f} GB"' if size and size % 1e9 == 0 and size < 1e15 else repr(float(size))


def _link_lines(link: Link) -> list[str]:
    finite = [f"bytes_per_s = {link.bytes_per_s!r}"] if link.bytes_per_s != float("inf") else []
    return [f"latency_s = {link.latency_s!r}", *finite]


def _link(link: Link, *more: str) -> str:
    return f"{{{', '.join(part for part in (*_link_lines(link), *more) if part)}}}"


def _cells(place: int, row: Sequence[float]) -> list[str]:
    return ["0.0" if place == column else repr(float(value)) for column, value in enumerate(row)]


def _text(text: str) -> str:
    """A TOML string; its escapes are those of JSON, except for one control character."""
    return json.dumps(text).replace("\x7f", "\\u007f")
