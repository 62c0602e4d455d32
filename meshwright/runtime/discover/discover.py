"""Measure this machine, or the cluster of a torchrun job, and describe it as a `Cluster`.

1. Every rank measures its device, all at the same time.
2. Pairs of ranks measure their link, one pair after another. With more than ALL_PAIRS ranks, only one pair inside each host and
   one per pair of hosts is measured and used for the others.
3. The fastest pair measures a collective, which may be slower than messages.
4. Rank 0 describes the result: as hosts, with one link inside and one card each, if that explains all pairs; else as matrices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Device, Host, Link
from meshwright.ir.files.cluster_writer import cluster_to_toml
from meshwright.runtime import device as devices
from meshwright.runtime.discover.collective_speed import fastest_pair, measure_collective
from meshwright.runtime.discover.device_speed import measure_device
from meshwright.runtime.discover.link_speed import MeasuredPair, channels, measure_pairs
from meshwright.runtime.json_exchange import all_gather_json, broadcast_json
from meshwright.runtime.launch.workers import Workers, attach
from meshwright.runtime.transport.choose import host_identity, open_transport

ALL_PAIRS = 16
"""The largest number of ranks for which every pair is measured."""
TOLERANCE = 0.1
"""A cluster is described by hosts if no pair differs from them by more than this share."""


@dataclass(frozen=True)
class Discovery:
    """The measured cluster, and its file."""

    cluster: Cluster
    text: str


def discover(*, workers: int | None = None, ready: Callable[[], None] = lambda: None) -> Discovery | None:
    """Measures this machine with local workers, or the job that torchrun has started. Returns None on ranks other than 0.

    `ready` is called first, on rank 0 only. If it raises, all ranks raise.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        if workers is not None:
            raise MeshwrightError(f"torchrun has started the workers, so --workers {workers} has no effect", fix="leave it out")
        with attach() as here:
            _first_rank(ready)
            return measure_ranks(here.device)
    count = (
        workers
        if workers is not None
        else (torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0)))
    )
    if count < 1:
        raise MeshwrightError(f"discover needs at least one worker, got {count}", fix="--workers 2")
    with Workers(count) as pool:
        found: list[Discovery | None] = pool.run(measure_local)
    return found[0]


def _first_rank(ready: Callable[[], None]) -> None:
    """Calls a function on rank 0. If it raises a MeshwrightError, all ranks raise it."""
    refused: list[str | None] | None = None
    if dist.get_rank() == 0:
        try:
            ready()
        except MeshwrightError as error:
            refused = [error.what, error.fix]
    if (said := broadcast_json(refused)) is not None:
        raise MeshwrightError(said[0], fix=said[1])


def measure_local() -> Discovery | None:
    """Measures inside local workers."""
    return measure_ranks(devices.choose(dist.get_rank()))


def measure_ranks(device: torch.device) -> Discovery | None:
    """Measures a process group. All ranks must call this; rank 0 gets the result."""
    homes: list[str] = all_gather_json(host_identity() or f"rank {dist.get_rank()}")
    _refuse_scattered(homes)
    sharers = homes.count(homes[dist.get_rank()])
    found: list[dict[str, Any]] = all_gather_json(measure_device(device, sharers))
    pairs = chosen_pairs(homes)
    measured: list[MeasuredPair] = []
    collective = Link()
    if pairs:
        transport = open_transport("auto", channels(pairs), dist.get_rank(), device=device)
        rows: list[list[list[float]]] = all_gather_json([list(pair) for pair in measure_pairs(transport, pairs, device)])
        measured = [MeasuredPair(int(source), int(target), *rest) for row in rows for source, target, *rest in row]
        transport.close()
        collective = measure_collective(fastest_pair(homes, measured), device)
    if dist.get_rank():
        return None
    collective = Link(rounded(collective.latency_s), rounded(collective.bytes_per_s))
    cluster = replace(described(homes, [Device(**one) for one in alike(found)], measured), collective=collective)
    return Discovery(cluster, _notes(measured, homes) + cluster_to_toml(cluster))


def _refuse_scattered(homes: Sequence[str]) -> None:
    """Raises on all ranks if the ranks of a host are not consecutive."""
    runs = [home for place, home in enumerate(homes) if place == 0 or homes[place - 1] != home]
    if len(runs) > len(set(runs)):
        raise MeshwrightError(
            f"the ranks of a host must be consecutive, got {len(set(homes))} hosts in {len(runs)} runs of ranks",
            fix="start one torchrun per host",
        )


def chosen_pairs(homes: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the pairs to measure: all, or one inside each host and one per pair of hosts, in both directions."""
    ranks = range(len(homes))
    if len(homes) <= ALL_PAIRS:
        return list(permutations(ranks, 2))
    first = {home: homes.index(home) for home in homes}
    inside = [(rank, rank + 1) for rank in first.values() if rank + 1 < len(homes) and homes[rank + 1] == homes[rank]]
    return [*inside, *permutations(first.values(), 2)]


def alike(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the measurements, with devices of the same kind replaced by their median, so that noise does not separate them."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault((one["kind"], one["memory_bytes"]), []).append(one)
    return [_typical(groups[one["kind"], one["memory_bytes"]]) for one in found]


def _typical(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in group[0]["flops_per_s"] if all(name in one["flops_per_s"] for one in group)]
    speeds = {name: rounded(median(one["flops_per_s"][name] for one in group)) for name in names}
    rest = {key: rounded(median(one[key] for one in group)) for key in ("bytes_per_s", "launch_s")}
    return {**group[0], "flops_per_s": speeds, **rest}


def rounded(value: float) -> float:
    """Returns a number rounded to three digits, the precision of the measurement."""
    return float(f"{value:.3g}")


def described(homes: Sequence[str], kinds: Sequence[Device], measured: Sequence[MeasuredPair]) -> Cluster:
    """Returns a cluster of hosts if one link inside and one card each explain all pairs, else one with matrices."""
    names = list(dict.fromkeys(homes))
    home = [names.index(one) for one in homes]
    hosts = [_host(number, home, measured) for number in range(len(names))]
    cluster = Cluster(hosts=tuple(hosts), devices=tuple(kinds))
    if all(_explained(cluster.between(pair.source, pair.target), pair) for pair in measured):
        return cluster
    rates, delays = ([[0.0] * len(homes) for _ in homes] for _ in range(2))
    known = {(pair.source, pair.target): pair for pair in measured}
    by_hosts = {(home[pair.source], home[pair.target]): pair for pair in measured}
    for a, b in permutations(range(len(homes)), 2):
        pair = known.get((a, b)) or by_hosts[home[a], home[b]]
        rates[a][b], delays[a][b] = rounded(pair.bytes_per_s), rounded(pair.latency_s)
    matrices = (tuple(map(tuple, rates)), tuple(map(tuple, delays)))
    return Cluster(devices=tuple(kinds), hosts=tuple(hosts), bandwidths=matrices[0], latencies=matrices[1])


def _host(number: int, home: Sequence[int], measured: Sequence[MeasuredPair]) -> Host:
    """Returns a host. Its inner link is the median of its pairs, its card the median of its fastest pairs to other hosts."""
    inside = [pair for pair in measured if home[pair.source] == home[pair.target] == number]
    outside = [pair for pair in measured if (home[pair.source] == number) != (home[pair.target] == number)]
    fastest = max((pair.bytes_per_s for pair in outside), default=0.0)
    card = [pair for pair in outside if pair.bytes_per_s >= (1 - TOLERANCE) * fastest]
    return Host(home.count(number), _middle(inside), _middle(card))


def _middle(pairs: Sequence[MeasuredPair]) -> Link:
    if not pairs:
        return Link()
    return Link(rounded(median(pair.latency_s for pair in pairs)), rounded(median(pair.bytes_per_s for pair in pairs)))


def _explained(link: Link, pair: MeasuredPair) -> bool:
    return abs(link.bytes_per_s / pair.bytes_per_s - 1) <= TOLERANCE


def _notes(measured: Sequence[MeasuredPair], homes: Sequence[str]) -> str:
    """Returns the first lines of the file: what was measured and what was not."""
    count = len(set(homes))
    hosts = f"{count} host{'' if count == 1 else 's'}"
    lines = [
        f"Measured by `meshwright cluster discover`: {len(homes)} ranks on {hosts}, {len(measured)} pairs, one",
        "after the other. fp32 and others: a large matmul on every rank at once. reads: a copy. launch: a small layer.",
        "collectives: an all-reduce of the fastest pair, where it is slower than messages.",
    ]
    if len(set(homes)) > 1 and len(set(homes)) < len(homes):
        lines.append("Devices that share a network card were not looked for: write per_node = CARDS into card = {...}.")
    return "".join(f"# {line}\n" for line in lines)
