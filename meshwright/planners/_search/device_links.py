"""Links of a cluster as arrays: many pairs and many groups of devices at once.

`ir/cluster.py` answers for one pair. A search asks for thousands of pairs and groups, so links are looked up by the hosts of
devices where a cluster has hosts, and in the matrix of bandwidths where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.cluster import Cluster, Link
from meshwright.ir.links.host_links import crossing

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SMALL = 12
"""Groups up to this size ask the cluster itself, which knows more ways to reduce."""


class DeviceLinks:
    """Latency and bandwidth between devices."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.size = cluster.size
        plain = bool(cluster.hosts) and not cluster.bandwidths and cluster.spine is None
        self.host = np.array(cluster.host_of, np.int64) if plain else None
        self.matrix, self.latency = (None, None) if plain else _matrices(cluster)
        self._groups: dict[tuple[object, ...], float] = {}
        if self.host is not None:
            self.inside = np.array([(h.inside.latency_s, h.inside.bytes_per_s) for h in cluster.hosts])
            self.card = np.array([(h.card.latency_s, h.card.bytes_per_s) for h in cluster.hosts])
            kinds = {pair: n for n, pair in enumerate(dict.fromkeys((h.inside, h.card) for h in cluster.hosts))}
            self.kind = np.array([kinds[h.inside, h.card] for h in cluster.hosts], np.int64)
        self._exceptions = dict(cluster.links)

    def between(self, source: Ints, target: Ints) -> tuple[Floats, Floats]:
        """Returns latency and bandwidth from each device to the one at the same place."""
        if self._exceptions:
            found = [self.cluster.between(int(a), int(b)) for a, b in zip(source.ravel(), target.ravel(), strict=True)]
            latency = np.array([link.latency_s for link in found]).reshape(source.shape)
            return latency, np.array([link.bytes_per_s for link in found]).reshape(source.shape)
        if self.matrix is not None:
            latency = np.full(source.shape, self.cluster.link.latency_s) if self.latency is None else self.latency[source, target]
            return latency, self.matrix[source, target]
        if self.host is not None:
            here, there = self.host[source], self.host[target]
            same = here == there
            latency = np.where(same, self.inside[here, 0], np.maximum(self.card[here, 0], self.card[there, 0]))
            return latency, np.where(same, self.inside[here, 1], np.minimum(self.card[here, 1], self.card[there, 1]))
        shape = source.shape
        return np.full(shape, self.cluster.link.latency_s), np.full(shape, self.cluster.link.bytes_per_s)

    def rates(self) -> Floats:
        """Returns the bandwidths of all pairs; infinite from a device to itself."""
        count = np.arange(self.size)
        found = np.array(self.between(*np.broadcast_arrays(count[:, None], count[None, :]))[1], dtype=np.float64)
        np.fill_diagonal(found, np.inf)
        return found

    def slowest(self, ranks: Sequence[int] | Ints, others: Sequence[int] | Ints | None = None) -> Link:
        """Returns the largest latency and the lowest bandwidth among some devices, or between them and others."""
        group = np.asarray(ranks, np.int64)
        rest = group if others is None else np.asarray(others, np.int64)
        if self.host is not None and not self._exceptions:
            hosts = np.unique(self.host[np.concatenate([group, rest])])
            table = self.inside if len(hosts) == 1 else self.card
            latency, rate = table[hosts, 0].max(), table[hosts, 1].min()
            if others is not None and len(hosts) > 1:  # pairs inside a host may be slower than the cards
                shared = np.intersect1d(self.host[group], self.host[rest])
                latency = max([latency, *self.inside[shared, 0]])
                rate = min([rate, *self.inside[shared, 1]])
            return Link(float(latency), float(rate))
        a, b = (x.ravel() for x in np.meshgrid(group, rest))
        keep = a != b
        if not keep.any():
            return Link()
        latency, rate = self.between(a[keep], b[keep])
        again_latency, again = self.between(b[keep], a[keep])
        return Link(float(max(latency.max(), again_latency.max())), float(min(rate.min(), again.min())))

    def gather_rates(self, groups: Sequence[Ints]) -> Floats:
        """Returns for each group a rate at which no gather of it is faster: of its slowest link, or of hosts and then devices."""
        if max(map(len, groups)) < 2:
            return np.full(len(groups), np.inf)
        if self.host is not None and not self._exceptions and len(set(map(len, groups))) == 1:
            hosts = np.sort(self.host[np.stack(list(groups))], axis=1)
            count, many = hosts.shape[1], 1 + (np.diff(hosts, axis=1) > 0).sum(axis=1)
            inside, card = self.inside[hosts, 1], self.card[hosts, 1]
            flat = np.where(many == 1, inside[:, 0], card.min(axis=1))
            each = count / many  # devices of a host
            by_hosts = (many - 1) / many / each / card.max(axis=1) + (each - 1) / each / inside.max(axis=1)
            found: Floats = np.maximum(flat, (count - 1) / count / by_hosts)
            return found
        return np.array([self.slowest(group).bytes_per_s for group in groups])

    def gather_s(self, ranks: Sequence[int] | Ints, size: float) -> float:
        """Returns how long a group needs to gather a buffer of which each device has an equal part."""
        group = np.asarray(ranks, np.int64)
        count = len(group)
        if count < 2 or size <= 0:
            return 0.0
        key = (count, size, *self._signature(group))
        found = self._groups.get(key)
        if found is None:
            if count <= SMALL:
                found = self.cluster.gather_s([int(device) for device in group], size)
            else:
                link = self.slowest(group)
                steps = count.bit_length() - 1 if count & (count - 1) == 0 else count - 1
                found = steps * link.latency_s + (count - 1) / count * size / link.bytes_per_s
            self._groups[key] = found
        return found

    def all_reduce_s(self, ranks: Sequence[int] | Ints, size: float) -> float:
        """Returns how long a group needs to add up a buffer."""
        group = np.asarray(ranks, np.int64)
        if len(group) <= SMALL and len(group) > 1 and size > 0:
            key = ("sum", len(group), size, *self._signature(group))
            if key not in self._groups:
                self._groups[key] = self.cluster.all_reduce_s([int(device) for device in group], size)
            return self._groups[key]
        return 2 * self.gather_s(group, size)

    def _signature(self, group: Ints) -> tuple[object, ...]:
        """What decides the time of a group: how many of its devices hosts of each kind have, or the devices themselves."""
        if self.host is None or self._exceptions:
            return tuple(int(device) for device in group)
        hosts, counts = np.unique(self.host[group], return_counts=True)
        return tuple(sorted(zip(self.kind[hosts].tolist(), counts.tolist(), strict=True)))


def _matrices(cluster: Cluster) -> tuple[Floats | None, Floats | None]:
    """Returns bandwidths and latencies of all pairs; None if one link, or one latency, is that of all."""
    seats = list(cluster.order or range(cluster.size))
    pick = np.ix_(seats, seats)
    if cluster.bandwidths:
        return np.array(cluster.bandwidths)[pick], np.array(cluster.latencies)[pick] if cluster.latencies else None
    if not cluster.hosts:
        return None, None
    host = np.array(cluster.host_of, np.int64)
    found = [[crossing(a, b, cluster.spine) for b in cluster.hosts] for a in cluster.hosts]
    for number, each in enumerate(cluster.hosts):
        found[number][number] = each.inside
    rates, latencies = (
        np.array([[getattr(link, name) for link in row] for row in found]) for name in ("bytes_per_s", "latency_s")
    )
    return rates[np.ix_(host, host)], latencies[np.ix_(host, host)]
