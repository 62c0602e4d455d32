"""Costs of the stages of a plan, and links between them, from a profile and a cluster. Planners and `simulate` both use this.

The devices that share a stage act as one worker. They run their rows at the same time, so a stage takes the time of the largest
share. Between two stages, each pair of devices sends the rows that both have; the slowest pair decides the time. Pairs that
cross the same network card divide its rate.

    ROWS    as a run sends them: the rows that two devices have in common, at most d / max(r, r')
    PAIRS   as in the paper of SPP: every pair sends d / (r r')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from meshwright.costs.memory.memory_classes import optimizer_state, stage_parameters
from meshwright.ir.cluster import Cluster, Device, Duplex, Link
from meshwright.ir.links.machines import same_kind
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.ir.profile import ChainCost, Profile
from meshwright.ir.stage_cost import StageCost


class GroupLinks(Protocol):
    """Properties of the links between groups of devices. `Cluster` has them; planners have a faster form for many devices."""

    def slowest(self, ranks: Sequence[int], others: Sequence[int] | None = None) -> Link:
        """Returns the largest latency and the lowest bandwidth among some devices, or between two groups of devices."""

    def all_reduce_s(self, ranks: Sequence[int], size: float) -> float:
        """Returns the seconds of an all-reduce of a buffer on these devices."""

    def gather_s(self, ranks: Sequence[int], size: float) -> float:
        """How long these devices need to gather a buffer of which each has an equal part."""

    def shared_links(self, pairs: Sequence[tuple[int, int]]) -> list[Link]:
        """The link of each pair (source, target) if all of them are used at once."""


class Charge(StrEnum):
    """How the bytes of a transfer between two groups of devices are counted."""

    ROWS = "rows"
    PAIRS = "pairs"


def shared_chain(profile: Profile, rows: int | None, width: int) -> ChainCost:
    """Returns the cost of layers on one of `width` devices that share a microbatch. Bytes are those of the whole microbatch."""
    if not profile.rows:
        return profile.at().divided(width)
    whole, share = profile.at(rows), profile.at(-(-(rows or 0) // width))
    return whole.with_times(share)


def device_slowness(profile: Profile, cluster: Cluster) -> list[float]:
    """Returns the time of each device relative to that of the profile, from the operations per second of both.

    If the profile does not name its device, it is assumed to be that of the fastest one; planners refuse a profile of a device
    that the cluster does not have. A device whose speed is not known is assumed to be as fast as that of the profile.
    """
    speeds = [achieved_speed(device, profile.precision) for device in cluster.devices] or [0.0] * cluster.size
    known = [speed for speed in speeds if speed > 0]
    own = [s for s, device in zip(speeds, cluster.devices, strict=False) if s > 0 and same_kind(device.kind, profile.device)]
    best = own[0] if own else max(known, default=1.0)
    return [best / speed if speed > 0 else 1.0 for speed in speeds]


PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
"""Short names of formats, as cluster files write them."""


def achieved_speed(device: Device, precision: str) -> float:
    """Returns the operations per second that a device achieves in a precision; its best speed if that is not known, or 0."""
    return known_speed(device, precision) or max(device.flops_per_s.values(), default=0.0)


def known_speed(device: Device, precision: str) -> float | None:
    """Returns the operations per second that a device achieves in a precision; None if its cluster does not tell."""
    speeds, short = device.flops_per_s, PRECISIONS.get(precision, precision)
    return speeds.get(precision) or speeds.get(short)


def stage_costs(
    profile: Profile,
    stages: Sequence[PlanStage],
    cluster: Cluster,
    *,
    rows: int | None = None,
    charge: Charge = Charge.ROWS,
    groups: GroupLinks | None = None,
    chains: Mapping[int, ChainCost] | None = None,
    slowness: Sequence[float] | None = None,
) -> tuple[StageCost, ...]:
    """Returns the cost of each stage of a plan on one of its devices. The slowest of its devices decides its time.

    Callers that already have `groups`, `chains` and `slowness` can pass them.
    """
    found: list[StageCost] = []
    if slowness is None:
        slowness = device_slowness(profile, cluster) if charge is Charge.ROWS else [1.0] * cluster.size
    launch = [device.launch_s for device in cluster.devices] if charge is Charge.ROWS else []
    if chains is None:
        chains = {width: shared_chain(profile, rows, width) for width in {stage.width for stage in stages}}
    for number, stage in enumerate(stages):
        chain, width = chains[stage.width], stage.width
        after = stages[number + 1].width if number + 1 < len(stages) else 0
        lanes = max(width, after) if charge is Charge.ROWS else width * after
        parameters = stage_parameters(profile, stage.layers)
        slow = max(slowness[device] for device in stage.devices)
        call = max((launch[device] for device in stage.devices), default=0.0) if launch else 0.0
        forward = slow * sum(chain.forward_s[layer] for layer in stage.layers) + call
        found.append(
            StageCost(
                forward_s=forward,
                input_s=slow * sum(chain.input_s[layer] for layer in stage.layers) + call,
                weight_s=slow * sum(chain.weight_s[layer] for layer in stage.layers),
                recompute_s=forward if stage.recompute else 0.0,
                sync_s=_sync_s(groups or cluster, stage.devices, parameters, charge),
                activation_bytes=sum(chain.saved_bytes[layer] for layer in stage.layers) / width,
                output_bytes=chain.output_bytes[stage.last] / lanes if after else 0.0,
                gradient_bytes=chain.gradient_bytes[stage.last] / lanes if after else 0.0,
                parameter_bytes=parameters,
                optimizer_bytes=optimizer_state(profile, parameters),
            )
        )
    return tuple(found)


def sum_seconds(links: GroupLinks, devices: Sequence[int], size: float, *, divided: bool) -> tuple[float, float]:
    """Returns the time to add up gradients of a stage, and to gather its parameters if devices divide its state (ZeRO)."""
    if not divided:
        return links.all_reduce_s(devices, size), 0.0
    once = links.gather_s(devices, size)
    return once, once


def of_microbatch(costs: Sequence[StageCost], widths: Sequence[int]) -> tuple[StageCost, ...]:
    """Returns the costs of whole microbatches, as a plan has them, from those of one device of each stage (`Charge.ROWS`)."""
    found: list[StageCost] = []
    for number, (cost, width) in enumerate(zip(costs, widths, strict=True)):
        lanes = max(widths[number : number + 2])
        found.append(
            replace(
                cost,
                forward_s=cost.forward_s * width,
                input_s=cost.input_s * width,
                weight_s=cost.weight_s * width,
                recompute_s=cost.recompute_s * width,
                activation_bytes=cost.activation_bytes * width,
                output_bytes=cost.output_bytes * lanes,
                gradient_bytes=cost.gradient_bytes * lanes,
            )
        )
    return tuple(found)


def _sync_s(cluster: GroupLinks, devices: Sequence[int], size: float, charge: Charge) -> float:
    if charge is Charge.ROWS:
        return sum_seconds(cluster, devices, size, divided=False)[0]
    count = len(devices)
    return 2 * (count - 1) / count * size / cluster.slowest(devices).bytes_per_s if count > 1 and size else 0.0


def stage_links(
    stages: Sequence[PlanStage], cluster: Cluster, *, charge: Charge = Charge.ROWS, groups: GroupLinks | None = None
) -> Cluster:
    """Returns the links between groups of devices, each group as one worker. SPP has links without latency, in one direction."""
    asked = groups or cluster
    found = [asked.slowest(one.devices, other.devices) for one, other in pairwise(stages)]
    if charge is Charge.PAIRS:
        found = [Link(0.0, link.bytes_per_s) for link in found]
    elif cluster.has_cards:
        found = _shared(found, stages, asked)
    links = {(number, number + 1): link for number, link in enumerate(found)}
    return Cluster(Link(), links, Duplex.HALF if charge is Charge.PAIRS else cluster.duplex)


def _shared(links: list[Link], stages: Sequence[PlanStage], cluster: GroupLinks) -> list[Link]:
    """Returns the links between stages if all pairs of devices that exchange rows use their network cards at once."""
    crossing = [
        (number, one.devices[a], other.devices[b])
        for number, (one, other) in enumerate(pairwise(stages))
        for a, b in common_rows(one.width, other.width)
    ]
    pairs = [(a, b) for _, a, b in crossing] + [(b, a) for _, a, b in crossing]
    for (number, _, _), link in zip(crossing * 2, cluster.shared_links(pairs), strict=True):
        links[number] = links[number].slower(link)
    return links


@lru_cache(maxsize=1024)
def common_rows(one: int, other: int) -> tuple[tuple[int, int], ...]:
    """Returns which of `one` devices and which of `other` devices have rows in common if both divide them equally."""
    return tuple((a, b) for a in range(one) for b in range(a * other // one, -(-(a + 1) * other // one)))
