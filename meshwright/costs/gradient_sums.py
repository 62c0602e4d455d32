"""What the sums of gradients of a plan take: those of each stage, and those of parameters that several stages share.

Sums of different stages run at the same time where they have different devices. If these leave a host through the same network
cards, they divide them: statically, as messages do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from meshwright.ir.cluster import Cluster
from meshwright.ir.profile import Profile


class SumLinks(Protocol):
    """The times of collectives. `Cluster` has them; planners have a faster form for many devices."""

    def all_reduce_s(self, ranks: Sequence[int], size: float, *, beside: int = 1) -> float:
        """Returns the seconds of an all-reduce of a buffer on these devices."""

    def gather_s(self, ranks: Sequence[int], size: float, *, beside: int = 1) -> float:
        """How long these devices need to gather a buffer of which each has an equal part."""


class SumCost(NamedTuple):
    """The sums of one stage: to add up its gradients, and to gather its parameters if devices divide its state (ZeRO).

    `tied_bytes` of its parameters belong to other stages too. Their sum is charged to the first of these stages, whose gradient
    is the last one: `tied_s`, which is part of `sync_s`.
    """

    sync_s: float = 0.0
    gather_s: float = 0.0
    tied_bytes: float = 0.0
    tied_s: float = 0.0


def stage_sums(
    ties: Sequence[TiedParameter],
    cluster: Cluster,
    links: SumLinks,
    stages: Sequence[range],
    groups: Sequence[Sequence[int]],
    sizes: Sequence[float],
    *,
    divided: bool = False,
    tp: int = 1,
) -> list[SumCost]:
    """Returns the sums of each stage, whose parameters of `sizes` bytes the devices of `groups` hold.

    Each of `tp` tensor ranks has sums of its own at the same time.
    """
    crowd = sums_beside(cluster, groups, tp)
    tied, tied_s = [0.0] * len(stages), [0.0] * len(stages)
    for holders, size in _tied_stages(ties, stages):
        devices = sorted({device for stage in holders for device in groups[stage]})
        tied_s[holders[0]] += links.all_reduce_s(devices, size / tp, beside=tp)
        for stage in holders:
            tied[stage] += size / tp
    found = []
    for group, size, beside, ours, seconds in zip(groups, sizes, crowd, tied, tied_s, strict=True):
        sync_s, gather_s = sum_seconds(links, group, max(0.0, size - ours), divided=divided, beside=beside)
        found.append(SumCost(sync_s + seconds, gather_s, ours, seconds))
    return found


def sum_seconds(links: SumLinks, devices: Sequence[int], size: float, *, divided: bool, beside: int = 1) -> tuple[float, float]:
    """Returns the time to add up gradients of a stage, and to gather its parameters if devices divide its state (ZeRO)."""
    if not divided:
        return links.all_reduce_s(devices, size, beside=beside), 0.0
    once = links.gather_s(devices, size, beside=beside)
    return once, once


def sums_beside(cluster: Cluster, groups: Sequence[Sequence[int]], tp: int = 1) -> list[int]:
    """For each group of devices: how many sums leave its hosts at the same time as its own, that one included.

    Sums of the same device come one after the other.
    """
    if not cluster.has_cards:
        return [1] * len(groups)
    hosts = [[cluster.host_of[device] for device in group] for group in groups]
    crossing = [len(set(of_group)) > 1 for of_group in hosts]
    busy: dict[int, set[int]] = {}
    for group, of_group, crosses in zip(groups, hosts, crossing, strict=True):
        for device, host in zip(group, of_group, strict=True):
            if crosses:
                busy.setdefault(host, set()).add(device)
    return [
        tp * max(-(-len(busy[host]) // of_group.count(host)) for host in set(of_group)) if crosses else 1
        for of_group, crosses in zip(hosts, crossing, strict=True)
    ]


class TiedParameter(NamedTuple):
    """A parameter that several layers use: these layers, and a bound on its size, that of the smallest of them."""

    layers: tuple[int, ...]
    size: float


def ties_of(profile: Profile) -> tuple[TiedParameter, ...]:
    """Returns the tied parameters of a model."""
    names = dict.fromkeys(name for layer in profile.layers for name in layer.ties)
    found = (tuple(n for n, layer in enumerate(profile.layers) if name in layer.ties) for name in names)
    return tuple(TiedParameter(layers, min(profile.layers[n].parameter_bytes for n in layers)) for layers in found)


def _tied_stages(ties: Sequence[TiedParameter], stages: Sequence[range]) -> list[tuple[list[int], float]]:
    """Returns the stages that share a parameter with others, and its bytes."""
    starts = [layers.start for layers in stages]
    homes = ((sorted({bisect_right(starts, layer) - 1 for layer in tie.layers}), tie.size) for tie in ties)
    return [(holders, size) for holders, size in homes if len(holders) > 1]
