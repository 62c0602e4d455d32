"""Devices and the links between them: how much memory a device has, how long a message or a reduction takes.

Three forms, from simple to arbitrary: one link for all pairs, hosts (with shared cards and racks), and matrices. `links` replaces
single pairs of any of them. Links among many devices are computed from the hosts, not from all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import itemgetter

from meshwright.errors import MeshwrightError
from meshwright.ir.links import collectives
from meshwright.ir.links.host_links import FREE, Pair, crossing, distinct_links, divided_cards, slowest_link
from meshwright.ir.links.link import Duplex, Link
from meshwright.ir.links.machines import Device, Host

__all__ = ["Cluster", "Device", "Duplex", "Host", "Link"]

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Cluster:
    """Devices and links: one link for every pair, hosts or matrices, and other links for the pairs that differ.

    Args:
        link: The link of every pair that has no other link.
        links: Other links by (source, target). A pair that is given in one direction is used for both.
        duplex: Whether the two directions of a link share it.
        devices: The devices, if they are known.
        hosts: The hosts, in the order of their devices. Devices of one host use its link `inside`, others the slower card.
        bandwidths: Bytes per second from each device to each other one. They replace those of hosts and of `link`.
        latencies: Seconds from each device to each other one, with `bandwidths`; empty if all have the latency of `link`.
        spine: The link between hosts of different racks, if it is slower than their cards.
        order: Device w of this cluster is number `order[w]` in its hosts and matrices; empty if the numbers are the same.
        collective: What a step of a collective achieves at most, if its software is slower than that of messages.

    Raises:
        MeshwrightError: The parts have different numbers of devices, or a matrix is not square.

    Examples:
        >>> from meshwright import Cluster, Link
        >>> cluster = Cluster(Link(1e-4, 1e10), {(1, 2): Link(1e-3, 1e9)})
        >>> cluster.between(2, 1).latency_s, cluster.between(0, 1).latency_s
        (0.001, 0.0001)
    """

    link: Link = FREE
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    duplex: Duplex = Duplex.FULL
    devices: tuple[Device, ...] = ()
    hosts: tuple[Host, ...] = ()
    bandwidths: Matrix = ()
    latencies: Matrix = ()
    spine: Link | None = None
    order: tuple[int, ...] = ()
    collective: Link = FREE

    def __post_init__(self) -> None:
        _refuse_shapes(self)

    @property
    def free(self) -> bool:
        """True if messages take no time at all."""
        return not self.links and not self.hosts and not self.bandwidths and self.link == FREE

    @cached_property
    def size(self) -> int:
        """The number of devices; 0 if it is not known."""
        return len(self.order) or len(self.devices) or len(self.bandwidths) or sum(host.devices for host in self.hosts)

    @cached_property
    def has_cards(self) -> bool:
        """True if some devices share the network cards of their host."""
        return any(host.cards for host in self.hosts) and not self.bandwidths

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The host of each device; empty if hosts are not known."""
        return tuple(host for host, _ in self.places)

    @cached_property
    def places(self) -> tuple[Pair, ...]:
        """The host of each device, and its number in the host."""
        found = tuple((number, place) for number, host in enumerate(self.hosts) for place in range(host.devices))
        return tuple(found[number] for number in self.order) if self.order and found else found

    @cached_property
    def _distinct(self) -> tuple[Link, ...]:
        """Every kind of link that some pair has, and perhaps some that a pair of `links` replaces."""
        if self.bandwidths:
            seats = self.order or range(self.size)
            found: set[tuple[float, float]] = set()
            for source in seats:
                delays = self.latencies[source] if self.latencies else (self.link.latency_s,) * len(self.bandwidths)
                rates = self.bandwidths[source]
                found.update((delays[target], rates[target]) for target in seats if target != source)
            return tuple({*self.links.values(), *(Link(*one) for one in found)})
        used = [self.hosts[host] for host in self.host_of]
        return tuple({*self.links.values(), *(distinct_links(used, self.spine) if used else {self.link})})

    def between(self, source: int, target: int) -> Link:
        """Returns the link from one device to another. A pair given in one direction only is used for both directions."""
        if self.links and (found := self.links.get((source, target)) or self.links.get((target, source))):
            return found
        if max(source, target) >= self.size > 0:
            self._refuse_devices(max(source, target))
        if self.bandwidths:
            a, b = (self.order[source], self.order[target]) if self.order else (source, target)
            return Link(self.latencies[a][b] if self.latencies else self.link.latency_s, self.bandwidths[a][b])
        if self.hosts:
            here, there = self.hosts[self.host_of[source]], self.hosts[self.host_of[target]]
            same = self.host_of[source] == self.host_of[target]
            return here.inside if same else crossing(here, there, self.spine)
        return self.link

    def refuse_missing(self, devices: Iterable[int]) -> None:
        """Raises if the cluster has fewer devices than these. If their number is not known, all of them exist."""
        if (last := max(devices, default=0)) >= self.size > 0:
            self._refuse_devices(last)

    def _refuse_devices(self, device: int) -> None:
        raise MeshwrightError(
            f"there is no device {device} in a cluster of {self.size} devices", fix="fewer workers, or a larger cluster"
        )

    def hop_s(self, sizes: Iterable[float]) -> float:
        """Returns the longest time that one of these messages needs over any of the links."""
        largest = max(sizes, default=None)
        return 0.0 if largest is None else max((link.latency_s + link.busy_s(largest) for link in self._distinct), default=0.0)

    def rates(self) -> list[list[float]]:
        """Returns the bytes per second from each device to each other one; infinite on the diagonal."""
        if self.hosts and not self.bandwidths:
            found = self._host_rates()
        elif self.bandwidths:
            seats = self.order or range(self.size)
            found = [[self.bandwidths[a][b] for b in seats] for a in seats]
        else:
            found = [[self.link.bytes_per_s] * self.size for _ in range(self.size)]
        for a, b in self.links:
            if max(a, b) < self.size:
                found[a][b], found[b][a] = self.between(a, b).bytes_per_s, self.between(b, a).bytes_per_s
        for device, row in enumerate(found):
            row[device] = float("inf")
        return found

    def _host_rates(self) -> list[list[float]]:
        """Returns the matrix of rates from the hosts: all devices of a host have equal rows, except on the diagonal."""
        rows: dict[int, list[float]] = {}
        for host in dict.fromkeys(self.host_of):
            here = self.hosts[host]
            others = [crossing(here, there, self.spine).bytes_per_s for there in self.hosts]
            others[host] = here.inside.bytes_per_s
            rows[host] = [others[there] for there in self.host_of]
        return [rows[host].copy() for host in self.host_of]

    def slowest(self, ranks: Sequence[int], others: Sequence[int] | None = None) -> Link:
        """Returns the largest latency and the lowest bandwidth among some devices, or from them to others."""
        if self.links:
            return self.slowest_pair((a, b) for a, b in product(ranks, ranks if others is None else others) if a != b)
        self.refuse_missing((*ranks, *(others or ())))
        if self.bandwidths:
            return self._slowest_rows(ranks, others)
        if self.hosts:
            return slowest_link(self.hosts, self.spine, self.host_of, ranks, others)
        many = len(set(ranks)) > 1 if others is None else bool(ranks and others and len({*ranks, *others}) > 1)
        return self.link if many else FREE

    def slowest_pair(self, pairs: Iterable[tuple[int, int]]) -> Link:
        """Returns the largest latency and the lowest bandwidth from the first to the second device of these pairs."""
        found = FREE
        for a, b in pairs:
            found = found.slower(self.between(a, b))
        return found

    def _slowest_rows(self, ranks: Sequence[int], others: Sequence[int] | None) -> Link:
        """Returns the slowest link from the matrices, with one pass over the columns of each row."""
        latency, rate = 0.0, float("inf")
        here, there = (
            [self.order[r] for r in group] if self.order else list(group)
            for group in (ranks, ranks if others is None else others)
        )
        for row in here:
            wanted = [column for column in there if column != row]
            if wanted:
                pick = itemgetter(*wanted, wanted[0])
                rate = min(rate, *pick(self.bandwidths[row]))
                latency = max(latency, *pick(self.latencies[row])) if self.latencies else self.link.latency_s
        return Link(latency, rate)

    def all_reduce_s(self, ranks: Sequence[int], size: float, *, beside: int = 1) -> float:
        """Returns the seconds of an all-reduce of a buffer on these devices: a reduce-scatter and a gather.

        Two devices of one host exchange their sums by messages, which `collective` does not limit.
        """
        pair = len(ranks) == 2 and bool(self.hosts) and self.host_of[ranks[0]] == self.host_of[ranks[1]]
        return 2 * self.gather_s(ranks, size, beside=beside, step=FREE if pair else self.collective)

    def gather_s(self, ranks: Sequence[int], size: float, *, beside: int = 1, step: Link | None = None) -> float:
        """Returns the seconds that these devices need to gather a buffer of `size` bytes, of which each has an equal part.

        It is the time of the fastest algorithm in `ir/links/collectives.py`. The slowest link decides. `beside` groups, this one
        included, share the network cards of their hosts. `step` is what a step achieves at most, if not `collective`.
        """
        count, step = len(ranks), self.collective if step is None else step
        if count < 2 or size <= 0:
            return 0.0
        slowest = busiest = self.slowest(ranks).slower(step)
        if not self.hosts:
            return collectives.flat_s(count, size, slowest)
        groups: dict[int, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self.host_of[rank], []).append(rank)
        if len(groups) == 1:
            return collectives.flat_s(count, size, slowest)
        for host, found in groups.items():
            slowest = slowest.slower(self.hosts[host].flow(beside))
            busiest = busiest.slower(self.hosts[host].flow(len(found) * beside))
        flat = collectives.flat_s(count, size, slowest, busiest)
        per_host = {len(found) for found in groups.values()}
        if len(per_host) > 1 or per_host == {1}:
            return flat
        (each,) = per_host
        inside, between = self._levels(list(groups.values()))
        for host in groups:
            between = between.slower(self.hosts[host].flow(each * beside))
        inside, between = inside.slower(step), between.slower(step)
        return min(flat, collectives.hierarchical_s(len(groups), each, size, inside=inside, between=between))

    def _levels(self, groups: Sequence[Sequence[int]]) -> tuple[Link, Link]:
        """Returns the slowest link inside the hosts of these groups of devices, and the slowest between them."""
        inside = between = FREE
        if not self.links and not self.bandwidths:
            homes = {self.host_of[group[0]] for group in groups}
            for host in homes:
                inside = inside.slower(self.hosts[host].inside)
            return inside, self.slowest([group[0] for group in groups])
        for group in groups:
            rest = [rank for other in groups if other is not group for rank in other]
            inside, between = inside.slower(self.slowest(group)), between.slower(self.slowest(group, rest))
        return inside, between

    def scatter_s(self, ranks: Sequence[int], size: float, *, beside: int = 1) -> float:
        """Returns the seconds of a reduce-scatter of a buffer on these devices."""
        return self.gather_s(ranks, size, beside=beside)

    def shared(self, pairs: Iterable[tuple[int, int]]) -> Cluster:
        """Returns this cluster with the rates of shared network cards divided by the pairs (source, target) that use them.

        A card is divided statically: its rate by the pairs that leave through it, and by those that arrive. Only these pairs
        change. Hosts whose `cards` are 0 have nothing to divide.
        """
        if not self.has_cards:
            return self
        half = self.duplex is Duplex.HALF
        found = divided_cards(self.hosts, pairs, self.places.__getitem__, self.spine, half=half)
        own = {*self.links, *((b, a) for a, b in self.links)}
        return replace(self, links={**{pair: link for pair, link in found.items() if pair not in own}, **self.links})

    def shared_links(self, pairs: Sequence[tuple[int, int]]) -> list[Link]:
        """Returns the link of each pair (source, target) if all of them are used at once."""
        busy = self.shared(pairs)
        return [busy.between(source, target) for source, target in pairs]

    def placed(self, ranks: Sequence[int]) -> Cluster:
        """Returns the cluster whose device w is device `ranks[w]` of this one."""
        self.refuse_missing(ranks)
        worker = {rank: place for place, rank in enumerate(ranks)}
        links = {(worker[a], worker[b]): link for (a, b), link in self.links.items() if a in worker and b in worker}
        devices = tuple(self.devices[rank] for rank in ranks) if self.devices else ()
        order = tuple(self.order[rank] for rank in ranks) if self.order else tuple(ranks)
        plain = not self.hosts and not self.bandwidths
        return replace(self, links=links, devices=devices, order=() if plain else order)


def _refuse_shapes(cluster: Cluster) -> None:
    """Raises if the parts of a cluster have different numbers of devices, or if a matrix is not square."""
    base = len(cluster.bandwidths) or sum(host.devices for host in cluster.hosts)
    counts = {"hosts": sum(host.devices for host in cluster.hosts), "devices": len(cluster.devices)}
    if cluster.order:
        counts["devices"] = 0
        if len(set(cluster.order)) < len(cluster.order) or not 0 <= min(cluster.order) <= max(cluster.order) < base:
            raise MeshwrightError(f"'order' of a cluster must name different devices below {base}, got {cluster.order[:8]}")
        if cluster.devices and len(cluster.devices) != len(cluster.order):
            raise MeshwrightError(f"a cluster orders {len(cluster.order)} devices and describes {len(cluster.devices)}")
    for what, count in counts.items():
        if count and base and count != base:
            raise MeshwrightError(f"a cluster has {base} devices in its links, and {count} in its {what}", fix="equal numbers")
    for name, matrix in (("bandwidths", cluster.bandwidths), ("latencies", cluster.latencies)):
        if matrix and (len(matrix) != len(cluster.bandwidths) or any(len(row) != len(matrix) for row in matrix)):
            raise MeshwrightError(
                f"'{name}' of a cluster must be a square matrix, got {len(matrix)} rows", fix="one row for each device"
            )
    if any(min(row[:a] + row[a + 1 :], default=1.0) <= 0 for a, row in enumerate(cluster.bandwidths)):
        raise MeshwrightError("the bandwidth between two devices must be above 0", fix="a small number for a slow link")
