"""A cluster as JSON: one link for all pairs, and a list of the pairs that differ. Hosts and matrices are written as TOML."""

from __future__ import annotations

import json
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir import reader as reading
from meshwright.ir.cluster import Cluster, Duplex, Link
from meshwright.ir.reader import Reader, count, number, parsed, rows

SCHEMA = 1


def cluster_to_json(cluster: Cluster) -> str:
    """Write a cluster as a file for `--cluster`.

    Args:
        cluster: The links to write.

    Returns:
        JSON text. An infinite bandwidth is left out.

    Raises:
        MeshwrightError: The cluster has devices, hosts, matrices or a link of collectives, which only TOML can hold.

    Examples:
        >>> from meshwright import Cluster, Link, cluster_from_json, cluster_to_json
        >>> cluster = Cluster(Link(1e-4, 1e10))
        >>> cluster_from_json(cluster_to_json(cluster)) == cluster
        True
    """

    if cluster.devices or cluster.hosts or cluster.bandwidths or cluster.collective != Link():
        raise MeshwrightError("JSON holds links, not devices, hosts, matrices or collectives", fix="cluster_to_toml(cluster)")

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
