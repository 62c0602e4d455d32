"""Links of a cluster as arrays: many pairs and many groups of devices at once.

`ir/cluster.py` answers for one pair or one group. A search asks for thousands. Devices of one host have the same links, so the
tables are by host where a cluster has hosts, else by device. `tests/planners/test_device_links.py` holds both equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.cluster import Cluster, Duplex, Link
from meshwright.ir.links.collectives import flat_s
from meshwright.ir.links.host_links import FREE

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Ranks = Sequence[int] | Ints


class DeviceLinks:
    """Latency and bandwidth between devices. `seat[d]` is the row of device d in the tables."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.size = cluster, cluster.size
        self.seat, self.latency, self.rate = _tables(cluster)
        self.by_device = len(self.rate) == self.size and bool((self.seat == np.arange(self.size)).all())
        if self.by_device:  # a device has no link to itself
            np.fill_diagonal(self.latency, 0.0)
            np.fill_diagonal(self.rate, np.inf)
        self.by_host = bool(cluster.hosts) and not cluster.bandwidths and not cluster.links
        self._gathers: dict[tuple[object, ...], float] = {}
        self._slowest: dict[tuple[object, ...], Link] = {}
        self._signatures: dict[object, tuple[object, ...]] = {}
        if self.by_host:
            kinds = {host: n for n, host in enumerate(dict.fromkeys(cluster.hosts))}
            self.kind = np.array([kinds[host] for host in cluster.hosts], np.int64)
            self.inside = np.array([host.inside.bytes_per_s for host in cluster.hosts])
            self.card = np.array([host.card.bytes_per_s for host in cluster.hosts])

    def between(self, source: Ints, target: Ints) -> tuple[Floats, Floats]:
        """Returns latency and bandwidth from each device to the one at the same place."""
        here, there = self.seat[source], self.seat[target]
        return self.latency[here, there], self.rate[here, there]

    def shared(self, source: Ints, target: Ints) -> tuple[Floats, Floats]:
        """Returns the same if all these pairs, each given once, are used at once: they divide network cards among them."""
        latency, rate = self.between(source, target)
        if not self.cluster.has_cards:
            return latency, rate
        if not self.by_host:  # single pairs have links of their own
            links = self.cluster.shared_links(list(zip(source.ravel().tolist(), target.ravel().tolist(), strict=True)))
            return latency, np.array([link.bytes_per_s for link in links]).reshape(rate.shape)
        here, there = self.seat[source], self.seat[target]
        crossing = here != there
        leaving, arriving = self._card[source], self._card[target]
        count = int(self._card.max()) + 1
        out, into = np.bincount(leaving[crossing], minlength=count), np.bincount(arriving[crossing], minlength=count)
        if self.cluster.duplex is Duplex.HALF:
            out = into = out + into
        for ends, flows, seats in ((leaving, out, here), (arriving, into, there)):
            divided = self.card[seats] / np.maximum(flows[ends], 1)
            rate = np.where(crossing & self._divides[seats], np.minimum(rate, divided), rate)
        return latency, rate

    def shared_links(self, pairs: Sequence[tuple[int, int]]) -> list[Link]:
        """Returns the link of each pair if all of them are used at once."""
        source, target = np.array(pairs, np.int64).reshape(-1, 2).T
        return [Link(*each) for each in zip(*(found.tolist() for found in self.shared(source, target)), strict=True)]

    def rates(self) -> Floats:
        """Returns the bandwidths of all pairs; infinite from a device to itself."""
        found: Floats = self.rate[np.ix_(self.seat, self.seat)].astype(np.float64)
        np.fill_diagonal(found, np.inf)
        return found

    def shared_parts(self) -> list[Ints]:
        """Returns what devices share: the host of each device, and its network card."""
        if not self.cluster.hosts:
            return []
        return [np.array(self.cluster.host_of, np.int64), *([self._card] if self.cluster.has_cards else [])]

    def slowest(self, ranks: Ranks, others: Ranks | None = None) -> Link:
        """Returns the largest latency and the lowest bandwidth among some devices, or from them to others."""
        one, other = tuple(ranks), tuple(ranks if others is None else others)
        found = self._slowest.get((one, other))
        if found is None and self.by_device:
            block = np.ix_(one, other)
            found = Link(float(self.latency[block].max()), float(self.rate[block].min()))
            self._slowest[one, other] = found
        elif found is None:
            together = np.bincount(self.seat[list({*one, *other})], minlength=len(self.rate))
            a, b = np.unique(self.seat[list(one)]), np.unique(self.seat[list(other)])
            pairs = (a[:, None] != b) | (together[b] > 1)  # a device has no link to itself
            latency = np.max(self.latency[np.ix_(a, b)], where=pairs, initial=0.0)
            found = Link(float(latency), float(np.min(self.rate[np.ix_(a, b)], where=pairs, initial=np.inf)))
            self._slowest[one, other] = found
        return found

    def slowest_pair(self, pairs: tuple[tuple[int, int], ...]) -> Link:
        """Returns the largest latency and the lowest bandwidth from the first to the second device of these pairs."""
        found = self._slowest.get(pairs)
        if found is None:
            source, target = np.array(pairs, np.int64).T
            latency, rate = self.between(source, target)
            found = self._slowest[pairs] = Link(float(latency.max()), float(rate.min()))
        return found

    def gather_rates(self, groups: Sequence[Ints]) -> Floats:
        """Returns for each group a rate at which no gather of it is faster: of its slowest link, or of hosts and then devices."""
        if max(map(len, groups)) < 2:
            return np.full(len(groups), np.inf)
        if self.by_host and len(set(map(len, groups))) == 1:
            hosts = np.sort(self.seat[np.stack(list(groups))], axis=1)
            count, many = hosts.shape[1], 1 + (np.diff(hosts, axis=1) > 0).sum(axis=1)
            inside, card = self.inside[hosts], self.card[hosts]
            flat = np.where(many == 1, inside[:, 0], card.min(axis=1))
            each = count / many  # devices of a host
            by_hosts = (many - 1) / many / each / card.max(axis=1) + (each - 1) / each / inside.max(axis=1)
            found: Floats = np.maximum(flat, (count - 1) / count / by_hosts)
            return found
        if len(set(map(len, groups))) == 1:
            seats = self.seat[np.stack(list(groups))]
            pairs = self.rate[seats[:, :, None], seats[:, None, :]]
            own = np.eye(seats.shape[1], dtype=bool)  # a device has no link to itself
            if self.cluster.hosts:  # some sums are faster than their slowest link: hosts first, then between them
                pairs[:, own] = 0.0
                fastest: Floats = pairs.max(axis=(1, 2))
                return fastest
            pairs[:, own] = np.inf
            slowest: Floats = pairs.min(axis=(1, 2))
            return slowest
        if self.cluster.hosts:
            return np.full(len(groups), np.inf)
        return np.array([self.slowest(group).bytes_per_s for group in groups])

    def gather_s(self, ranks: Ranks, size: float, *, beside: int = 1) -> float:
        """Returns how long a group needs to gather a buffer of which each device has an equal part."""
        count = len(ranks)
        if count < 2 or size <= 0:
            return 0.0
        if not self.cluster.hosts:
            return flat_s(count, size, self.slowest(ranks).slower(self.cluster.collective))
        key = (size, beside, *self._signature(ranks))
        if key not in self._gathers:
            self._gathers[key] = self.cluster.gather_s([int(device) for device in ranks], size, beside=beside)
        return self._gathers[key]

    def all_reduce_s(self, ranks: Ranks, size: float, *, beside: int = 1) -> float:
        """Returns how long a group needs to add up a buffer: as long as a scatter of sums and a gather."""
        if len(ranks) == 2 and self.cluster.collective != FREE:
            return self.cluster.all_reduce_s([int(device) for device in ranks], size, beside=beside)
        return 2 * self.gather_s(ranks, size, beside=beside)

    def _signature(self, ranks: Ranks) -> tuple[object, ...]:
        """What decides the time of a group: how many of its devices hosts of each kind have, or the devices themselves."""
        devices = ranks.tobytes() if isinstance(ranks, np.ndarray) else tuple(ranks)
        found = self._signatures.get(devices)
        if found is None:
            found = (devices,)
            if self.by_host:
                hosts, counts = np.unique(self.seat[np.asarray(ranks, np.int64)], return_counts=True)
                found = tuple(sorted(zip(self.kind[hosts].tolist(), counts.tolist(), strict=True)))
            self._signatures[devices] = found
        return found

    @cached_property
    def _divides(self) -> NDArray[np.bool_]:
        """Whether the devices of a host share its cards."""
        return np.array([host.cards > 0 for host in self.cluster.hosts])

    @cached_property
    def _card(self) -> Ints:
        """The card of each device, with a number of its own."""
        seen: dict[tuple[int, int], int] = {}
        found = [(host, self.cluster.hosts[host].card_of(place)) for host, place in self.cluster.places]
        return np.array([seen.setdefault(card, len(seen)) for card in found], np.int64)


def _tables(cluster: Cluster) -> tuple[Ints, Floats, Floats]:
    """Returns the row of each device, latency and bandwidth by rows. A row may be a host, with its inner link on the diagonal."""
    count = cluster.size
    if cluster.bandwidths:
        order = np.array(cluster.order or range(count), np.int64)
        rate = np.array(cluster.bandwidths, np.float64)[np.ix_(order, order)]
        known = np.array(cluster.latencies or cluster.link.latency_s, np.float64)
        known = known[np.ix_(order, order)] if cluster.latencies else known
        seat, latency = np.arange(count), np.broadcast_to(known, rate.shape).copy()
    elif cluster.hosts:
        seat, hosts = np.array(cluster.host_of, np.int64), cluster.hosts
        cards, inside = ([getattr(host, name) for host in hosts] for name in ("card", "inside"))
        latency = np.maximum.outer(*[np.array([link.latency_s for link in cards], np.float64)] * 2)
        rate = np.minimum.outer(*[np.array([link.bytes_per_s for link in cards], np.float64)] * 2)
        if cluster.spine is not None:
            racks = np.array([host.rack for host in hosts])
            far = racks[:, None] != racks
            latency = np.where(far, np.maximum(latency, cluster.spine.latency_s), latency)
            rate = np.where(far, np.minimum(rate, cluster.spine.bytes_per_s), rate)
        np.fill_diagonal(latency, [link.latency_s for link in inside])
        np.fill_diagonal(rate, [link.bytes_per_s for link in inside])
    else:
        seat = np.zeros(count, np.int64)
        latency, rate = (np.full((1, 1), value, np.float64) for value in (cluster.link.latency_s, cluster.link.bytes_per_s))
    if cluster.links:
        latency, rate, seat = latency[np.ix_(seat, seat)], rate[np.ix_(seat, seat)], np.arange(count)
        for a, b in [(a, b) for pair in cluster.links for a, b in (pair, pair[::-1]) if max(pair) < count]:
            link = cluster.between(a, b)
            latency[a, b], rate[a, b] = link.latency_s, link.bytes_per_s
    return seat, latency, rate
