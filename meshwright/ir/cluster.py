"""The links between workers: how long a message between two of them takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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


@dataclass(frozen=True)
class Cluster:
    """The links between workers: one for every pair, and others for the pairs that differ.

    Args:
        link: The link of every pair that `links` does not name.
        links: Other links by (source, target). A pair that is given in one direction holds for both.
        duplex: Whether the two directions of a link share it.

    Examples:
        >>> from meshwright import Cluster, Link
        >>> cluster = Cluster(Link(1e-4, 1e10), {(1, 2): Link(1e-3, 1e9)})
        >>> cluster.between(2, 1).latency_s, cluster.between(0, 1).latency_s
        (0.001, 0.0001)
    """

    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    duplex: Duplex = Duplex.FULL

    @property
    def free(self) -> bool:
        """True if messages take no time at all."""
        return not self.links and self.link == Link()

    def between(self, source: int, target: int) -> Link:
        """Returns the link from one worker to another. A pair given in one direction only is used for both directions."""
        return self.links.get((source, target)) or self.links.get((target, source)) or self.link

    def hop_s(self, sizes: Iterable[float]) -> float:
        """Returns the longest time that one of these messages needs over any of the links."""
        links = [self.link, *self.links.values()]
        return max((link.latency_s + link.busy_s(size) for size in sizes for link in links), default=0.0)


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
    return Cluster(read("link", _link, Link()), read("links", lambda value: dict(map(_pair, rows(value))), {}), duplex)


def _link(row: Any) -> Link:
    read = Reader(row, "a link", kind=None, schema=SCHEMA, keys=frozenset({"latency_s", "bytes_per_s", "source", "target"}))
    return Link(read("latency_s", number, 0.0), read("bytes_per_s", number, float("inf")))


def _pair(row: Any) -> tuple[tuple[int, int], Link]:
    return (count(row["source"]), count(row["target"])), _link(row)
