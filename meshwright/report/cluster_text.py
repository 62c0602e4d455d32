"""A cluster in the terminal: its devices, hosts and links, and the time of an all-reduce of one gigabyte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.ir.cluster import Cluster, Device, Link

GIGABYTE = 1e9


def cluster_text(name: str, cluster: Cluster) -> str:
    """Returns the devices by kind, the links, and the time of an all-reduce."""
    hosts = f" on {_counted(len(cluster.hosts), 'host')}" if cluster.hosts else ""
    lines = [f"{name}: {_counted(cluster.size, 'device')}{hosts}"]
    for device, count in _kinds(cluster.devices):
        lines.append(f"  {count} x {device.kind}: {', '.join(_about(device)) or 'nothing is known about it'}")
    lines += [f"  {line}" for line in _links(cluster)]
    if cluster.size > 1:
        lines.append(f"  1 GB summed over all devices: {seconds(cluster.all_reduce_s(range(cluster.size), GIGABYTE))}")
    return "\n".join(lines)


def cluster_data(name: str, cluster: Cluster) -> dict[str, Any]:
    """Returns the same as data."""
    everyone = range(cluster.size)
    return {
        "name": name,
        "devices": cluster.size,
        "hosts": len(cluster.hosts),
        "kinds": [_plain(device) | {"count": count} for device, count in _kinds(cluster.devices)],
        "all_reduce_1gb_s": cluster.all_reduce_s(everyone, GIGABYTE),
    }


def _plain(device: Device) -> dict[str, Any]:
    finite = {"memory_bytes": device.memory_bytes, "bytes_per_s": device.bytes_per_s, "launch_s": device.launch_s}
    known = {key: value for key, value in finite.items() if value != float("inf")}
    return {"kind": device.kind, "flops_per_s": dict(device.flops_per_s), **known}


def _kinds(devices: Sequence[Device]) -> list[tuple[Device, int]]:
    found: list[tuple[Device, int]] = []
    for device in devices:
        place = next((place for place, (known, _) in enumerate(found) if known == device), None)
        if place is None:
            found.append((device, 1))
        else:
            found[place] = device, found[place][1] + 1
    return found


def _about(device: Device) -> list[str]:
    found = [f"{_scaled(device.memory_bytes)}B"] if device.memory_bytes != float("inf") else []
    found += [f"{precision} {_scaled(speed)}FLOPS" for precision, speed in device.flops_per_s.items()]
    if device.bytes_per_s != float("inf"):
        found.append(f"reads {_scaled(device.bytes_per_s)}B/s")
    return [*found, *([f"launch {seconds(device.launch_s)}"] if device.launch_s else [])]


def _links(cluster: Cluster) -> list[str]:
    if cluster.bandwidths:
        rates = sorted(rate for a, row in enumerate(cluster.bandwidths) for b, rate in enumerate(row) if a != b)
        found = [f"matrix of links: {_scaled(rates[0])}B/s to {_scaled(rates[-1])}B/s"] if rates else []
        return found + _collectives(cluster)
    found = [f"every pair: {link_text(cluster.link)}"] if not cluster.hosts else []
    kinds = dict(zip(cluster.host_of, (device.kind for device in cluster.devices), strict=False))
    for host, kind in dict.fromkeys((host, kinds.get(number, "devices")) for number, host in enumerate(cluster.hosts)):
        where = "" if len(set(cluster.hosts)) == 1 else f" of {host.devices} {kind}"
        if host.devices > 1:
            found.append(f"inside a host{where}: {link_text(host.inside)}")
        if len(cluster.hosts) > 1 or host.cards:
            shared = f", {_counted(host.cards, 'card')} for {host.devices} devices" if host.cards else ""
            found.append(f"between hosts{where}: {link_text(host.card)}{shared}")
    if cluster.spine is not None:
        found.append(f"between racks: {link_text(cluster.spine)}")
    others = [f"{len(cluster.links)} pairs have other links"] if cluster.links else []
    return [*dict.fromkeys(found), *_collectives(cluster), *others]


def _collectives(cluster: Cluster) -> list[str]:
    return [f"collectives, at most: {link_text(cluster.collective)}"] if cluster.collective != Link() else []


def link_text(link: Link) -> str:
    """Returns a link with its units."""
    rate = f"{_scaled(link.bytes_per_s)}B/s" if link.bytes_per_s != float("inf") else "no limit"
    return f"{rate}, latency {seconds(link.latency_s)}"


def seconds(time_s: float) -> str:
    """Returns a time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time_s >= size:
            return f"{time_s / size:.3g} {unit}"
    return f"{time_s * 1e9:.3g} ns" if time_s else "0 s"


def _scaled(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
