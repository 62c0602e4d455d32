"""Devices and the links between them: how much memory a device has, how long a message or a reduction takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import combinations
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir import reader as reading
from meshwright.ir.reader import Reader, count, number, parsed, rows

SCHEMA = 1


class Duplex(StrEnum):
    """Whether the two directions of a link share it.

    `FULL`: each direction has the whole bandwidth. `HALF`: the two directions of a pair take turns.

    Examples:
        >>> from meshwright import Cluster, Duplex, Link
        >>> Cluster(Link(bytes_per_s=1e9), duplex=Duplex.HALF).duplex.value
        'half'
    """

    FULL = "full"
    HALF = "half"


@dataclass(frozen=True, slots=True)
class Link:
    """What a message between two workers costs.

    A message takes `latency_s + bytes / bytes_per_s`. It occupies the link for the second term only.

    Args:
        latency_s: Seconds before the first byte arrives.
        bytes_per_s: The bandwidth.

    Raises:
        MeshwrightError: The latency is negative or infinite, or the bandwidth is not above zero.

    Examples:
        >>> from meshwright import Link
        >>> Link(latency_s=1e-3, bytes_per_s=1e9).busy_s(5e8)
        0.5
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not 0.0 <= self.latency_s < float("inf") or not self.bytes_per_s > 0.0:
            raise MeshwrightError(
                f"a link needs a latency of at least 0 and a bandwidth above 0, got {self.latency_s} and {self.bytes_per_s}"
            )

    def busy_s(self, size: float) -> float:
        """Returns how long a message of this size occupies the link."""
        return size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a cluster.

    Args:
        kind: Its name, such as `a100`.
        memory_bytes: Its memory.
        flops_per_s: Operations per second that it achieves, by precision.
        bytes_per_s: Bytes per second that it reads from its memory.
        launch_s: Seconds that one call of a stage costs before it computes.

    Examples:
        >>> from meshwright import Device
        >>> Device("a100", 80e9, {"bf16": 312e12}).memory_bytes
        80000000000.0
    """

    kind: str = "device"
    memory_bytes: float = float("inf")
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float = float("inf")
    launch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Host:
    """A host with several devices.

    Args:
        devices: How many devices it has.
        inside: The link between two of them.
        card: The link to other hosts.

    Examples:
        >>> from meshwright import Cluster, Host, Link
        >>> host = Host(8, inside=Link(5e-6, 250e9), card=Link(2e-5, 25e9))
        >>> Cluster(hosts=(host, host)).between(0, 9).bytes_per_s
        25000000000.0
    """

    devices: int
    inside: Link
    card: Link


@dataclass(frozen=True)
class Cluster:
    """Devices and links: one link for every pair, and others for the pairs that differ.

    Args:
        link: The link of every pair that nothing else names.
        links: Other links by (source, target). A pair that is given in one direction holds for both.
        duplex: Whether the two directions of a link share it.
        devices: The devices, if they are known.
        hosts: The hosts, in the order of their devices. Devices of one host use its link `inside`, others the slower card.
        bandwidths: Bytes per second from each device to each other one, with the latency of `link`.

    Examples:
        >>> from meshwright import Cluster, Link
        >>> cluster = Cluster(Link(1e-4, 1e10), {(1, 2): Link(1e-3, 1e9)})
        >>> cluster.between(2, 1).latency_s, cluster.between(0, 1).latency_s
        (0.001, 0.0001)
    """

    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    duplex: Duplex = Duplex.FULL
    devices: tuple[Device, ...] = ()
    hosts: tuple[Host, ...] = ()
    bandwidths: tuple[tuple[float, ...], ...] = ()

    @property
    def free(self) -> bool:
        """True if messages take no time at all."""
        return not self.links and not self.hosts and not self.bandwidths and self.link == Link()

    @cached_property
    def size(self) -> int:
        """The number of devices; 0 if it is not known."""
        return len(self.devices) or len(self.bandwidths) or sum(host.devices for host in self.hosts)

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The host of each device; empty if hosts are not known."""
        return tuple(number for number, host in enumerate(self.hosts) for _ in range(host.devices))

    def between(self, source: int, target: int) -> Link:
        """Returns the link from one device to another. A pair given in one direction only is used for both directions."""
        if self.links and (found := self.links.get((source, target)) or self.links.get((target, source))):
            return found
        if max(source, target) >= self.size > 0:
            raise MeshwrightError(
                f"there is no device {max(source, target)} in a cluster of {self.size} devices",
                fix="fewer workers, or a larger cluster",
            )
        if self.bandwidths:
            return Link(self.link.latency_s, self.bandwidths[source][target])
        if self.hosts:
            here, there = self.host_of[source], self.host_of[target]
            return self.hosts[here].inside if here == there else _slower(self.hosts[here].card, self.hosts[there].card)
        return self.link

    def hop_s(self, sizes: Iterable[float]) -> float:
        """Returns the longest time that one of these messages needs over any of the links."""
        links = [self.link, *self.links.values(), *(link for host in self.hosts for link in (host.inside, host.card))]
        if self.bandwidths:
            slowest = min(rate for a, row in enumerate(self.bandwidths) for b, rate in enumerate(row) if a != b)
            links = [Link(self.link.latency_s, slowest), *self.links.values()]
        return max((link.latency_s + link.busy_s(size) for size in sizes for link in links), default=0.0)

    def slowest(self, ranks: Sequence[int], others: Sequence[int] | None = None) -> Link:
        """Returns the largest latency and the lowest bandwidth among some devices, or between them and others."""
        pairs = combinations(ranks, 2) if others is None else ((a, b) for a in ranks for b in others if a != b)
        latency, rate = 0.0, float("inf")
        for a, b in pairs:
            for link in (self.between(a, b), self.between(b, a)):
                latency, rate = max(latency, link.latency_s), min(rate, link.bytes_per_s)
        return Link(latency, rate)

    def all_reduce_s(self, ranks: Sequence[int], size: float) -> float:
        """Returns how long these devices need to add up a buffer, as a scatter of sums and a gather."""
        return self.scatter_s(ranks, size) + self.gather_s(ranks, size)

    def gather_s(self, ranks: Sequence[int], size: float) -> float:
        """Returns how long these devices need to gather a buffer of `size` bytes of which each has an equal part.

        Parts are passed around a ring, or doubled in each step if the number of devices is a power of two. The slowest link
        among them decides.
        """
        count = len(ranks)
        if count < 2 or size <= 0:
            return 0.0
        link = self.slowest(ranks)
        steps = count.bit_length() - 1 if count & (count - 1) == 0 else count - 1
        return steps * link.latency_s + (count - 1) / count * size / link.bytes_per_s

    def scatter_s(self, ranks: Sequence[int], size: float) -> float:
        """Returns how long these devices need to add up a buffer so that each has the sum of an equal part."""
        return self.gather_s(ranks, size)

    def placed(self, ranks: Sequence[int]) -> Cluster:
        """Returns the cluster whose device w is device `ranks[w]` of this one."""
        rates = tuple(tuple(0.0 if a == b else self.between(a, b).bytes_per_s for b in ranks) for a in ranks)
        latency = max((self.between(a, b).latency_s for a, b in combinations(ranks, 2)), default=self.link.latency_s)
        devices = tuple(self.devices[rank] for rank in ranks) if self.devices else ()
        return replace(self, link=Link(latency), links={}, hosts=(), bandwidths=rates, devices=devices)


def _slower(one: Link, other: Link) -> Link:
    return Link(max(one.latency_s, other.latency_s), min(one.bytes_per_s, other.bytes_per_s))


def cluster_to_json(cluster: Cluster) -> str:
    """Write a cluster as a file for `--cluster`.

    Args:
        cluster: The links to write.

    Returns:
        JSON text. An infinite bandwidth is left out.

    Examples:
        >>> from meshwright import Cluster, Link, cluster_from_json, cluster_to_json
        >>> cluster = Cluster(Link(1e-4, 1e10))
        >>> cluster_from_json(cluster_to_json(cluster)) == cluster
        True
    """

    def shown(link: Link) -> dict[str, float]:
        finite = {"bytes_per_s": link.bytes_per_s} if link.bytes_per_s != float("inf") else {}
        return {"latency_s": link.latency_s, **finite}

    pairs = [{"source": a, "target": b, **shown(link)} for (a, b), link in cluster.links.items()]
    data = {"schema": SCHEMA, "kind": "cluster", "duplex": cluster.duplex.value, "link": shown(cluster.link), "links": pairs}
    return json.dumps(data, indent=1)


def cluster_from_json(text: str) -> Cluster:
    """Read a cluster from its file form.

    Args:
        text: The JSON text.

    Returns:
        The cluster.

    Raises:
        MeshwrightError: The text is not a cluster file, or a number in it is not possible.

    Examples:
        >>> from meshwright import cluster_from_json
        >>> text = '{"schema": 1, "kind": "cluster", "link": {"latency_s": 0.1}}'
        >>> cluster_from_json(text).link.latency_s
        0.1
    """
    keys = frozenset({"schema", "kind", "duplex", "link", "links"})
    read = Reader(parsed(text, "a cluster file"), "a cluster file", kind="cluster", schema=SCHEMA, keys=keys)
    duplex = read("duplex", lambda value: Duplex(reading.text(value)), Duplex.FULL)
    return Cluster(read("link", link_from, Link()), read("links", lambda value: dict(map(_pair, rows(value))), {}), duplex)


def link_from(row: Any) -> Link:
    """Reads a link from a table of a file."""
    read = Reader(row, "a link", kind=None, schema=SCHEMA, keys=frozenset({"latency_s", "bytes_per_s", "source", "target"}))
    return Link(read("latency_s", number, 0.0), read("bytes_per_s", number, float("inf")))


def _pair(row: Any) -> tuple[tuple[int, int], Link]:
    return (count(row["source"]), count(row["target"])), link_from(row)
