"""Costs of the stages of a plan, and links between them, from a profile and a cluster. Planners and `simulate` both use this.

The devices that share a stage act as one worker. They run their rows at the same time, so a stage takes the time of the largest
share. Between two stages, each pair of devices sends the rows that both have; the slowest of these pairs decides the time. Pairs
that cross the same network card divide its rate.

    ROWS    as a run sends them: the rows that two devices have in common, d / max(r, r') if rows divide evenly
    PAIRS   as in the paper of SPP: every pair sends d / (r r')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from meshwright.costs.gradient_sums import SumCost, SumLinks, TiedParameter, stage_sums, ties_of
from meshwright.costs.memory.memory_classes import optimizer_state, stage_parameters
from meshwright.ir.cluster import Cluster, Device, Duplex, Link
from meshwright.ir.links.machines import same_kind
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.ir.profile import ChainCost, Profile
from meshwright.ir.stage_cost import StageCost


class GroupLinks(SumLinks, Protocol):
    """Properties of the links between groups of devices. `Cluster` has them; planners have a faster form for many devices."""

    def slowest(self, ranks: Sequence[int], others: Sequence[int] | None = None) -> Link:
        """Returns the largest latency and the lowest bandwidth among some devices, or from them to others."""

    def slowest_pair(self, pairs: tuple[tuple[int, int], ...]) -> Link:
        """Returns the largest latency and the lowest bandwidth from the first to the second device of these pairs."""

    def shared_links(self, pairs: Sequence[tuple[int, int]]) -> list[Link]:
        """The link of each pair (source, target) if all of them are used at once."""


Pair = tuple[int, int]


class Charge(StrEnum):
    """How the bytes of a transfer between two groups of devices are counted."""

    ROWS = "rows"
    PAIRS = "pairs"


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
    ties: Sequence[TiedParameter] | None = None,
) -> tuple[StageCost, ...]:
    """Returns the cost of each stage of a plan on one of its devices. The slowest of its devices decides its time.

    Callers that already have `groups`, `chains`, `slowness` and `ties` can pass them.
    """
    found: list[StageCost] = []
    if slowness is None:
        slowness = device_slowness(profile, cluster) if charge is Charge.ROWS else [1.0] * cluster.size
    launch = [device.launch_s for device in cluster.devices] if charge is Charge.ROWS else []
    if chains is None:
        chains = {width: profile.shared(rows, width) for width in {stage.width for stage in stages}}
    sizes = [stage_parameters(profile, stage.layers) for stage in stages]
    if charge is Charge.PAIRS:
        sums = _published_sums(groups or cluster, stages, sizes)
    else:
        ranges, devices = [stage.layers for stage in stages], [stage.devices for stage in stages]
        ties = ties_of(profile) if ties is None else ties
        sums = stage_sums(ties, cluster, groups or cluster, ranges, devices, sizes)
    for number, (stage, size, costs) in enumerate(zip(stages, sizes, sums, strict=True)):
        chain, width = chains[stage.width], stage.width
        after = stages[number + 1].width if number + 1 < len(stages) else 0
        sent = sent_share(width, after, rows if profile.rows else None, charge) if after else 0.0
        slow = max(slowness[device] for device in stage.devices)
        call = max((launch[device] for device in stage.devices), default=0.0) if launch else 0.0
        forward = slow * sum(chain.forward_s[layer] for layer in stage.layers) + call
        found.append(
            StageCost(
                forward_s=forward,
                input_s=slow * sum(chain.input_s[layer] for layer in stage.layers) + call,
                weight_s=slow * sum(chain.weight_s[layer] for layer in stage.layers),
                recompute_s=forward if stage.recompute else 0.0,
                sync_s=costs.sync_s,
                activation_bytes=sum(chain.saved_bytes[layer] for layer in stage.layers),
                output_bytes=chain.output_bytes[stage.last] * sent,
                gradient_bytes=chain.gradient_bytes[stage.last] * sent,
                parameter_bytes=size,
                optimizer_bytes=optimizer_state(profile, size),
                tied_bytes=costs.tied_bytes,
                tied_s=costs.tied_s,
            )
        )
    return tuple(found)


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


def _published_sums(links: GroupLinks, stages: Sequence[PlanStage], sizes: Sequence[float]) -> list[SumCost]:
    """A ring over the slowest link of each stage, without latency."""
    found = []
    for stage, size in zip(stages, sizes, strict=True):
        share = 2 * (stage.width - 1) / stage.width * size
        found.append(SumCost(share / links.slowest(stage.devices).bytes_per_s if share else 0.0))
    return found


def stage_links(
    stages: Sequence[PlanStage], cluster: Cluster, *, charge: Charge = Charge.ROWS, groups: GroupLinks | None = None
) -> Cluster:
    """Returns the links between groups of devices, each group as one worker. SPP has links without latency, in one direction."""
    asked, links = groups or cluster, dict[Pair, Link]()
    for number, (one, other) in enumerate(pairwise(stages)):
        if charge is Charge.PAIRS:
            both = asked.slowest(one.devices, other.devices).slower(asked.slowest(other.devices, one.devices))
            there = back = Link(0.0, both.bytes_per_s)
        else:
            rows = common_rows(one.width, other.width)
            pairs = tuple((one.devices[a], other.devices[b]) for a, b in rows)
            there, back = asked.slowest_pair(pairs), asked.slowest_pair(tuple(pair[::-1] for pair in pairs))
        links |= {(number, number + 1): there, (number + 1, number): back}
    if charge is Charge.ROWS and cluster.has_cards:
        links = _shared(links, stages, asked)
    return Cluster(Link(), links, Duplex.HALF if charge is Charge.PAIRS else cluster.duplex)


def _shared(links: dict[Pair, Link], stages: Sequence[PlanStage], cluster: GroupLinks) -> dict[Pair, Link]:
    """Returns the links between stages if all pairs of devices that exchange rows use their network cards at once."""
    crossing = [
        ((number, number + 1), (one.devices[a], other.devices[b]))
        for number, (one, other) in enumerate(pairwise(stages))
        for a, b in common_rows(one.width, other.width)
    ]
    crossing += [(ends[::-1], pair[::-1]) for ends, pair in crossing]
    shared = cluster.shared_links([pair for _, pair in crossing])
    for (ends, _), link in zip(crossing, shared, strict=True):
        links[ends] = links[ends].slower(link)
    return links


@lru_cache(maxsize=4096)
def sent_share(width: int, after: int, rows: int | None, charge: Charge) -> float:
    """Returns the largest share of a microbatch that one device of a stage sends to one of the next stage."""
    if charge is Charge.PAIRS:
        return 1 / (width * after)
    if rows is None:
        return 1 / max(width, after)
    ends = [(rows * (a + 1) // width, rows * a // width) for a in range(width)]
    others = [(rows * (b + 1) // after, rows * b // after) for b in range(after)]
    pairs = ((ends[a], others[b]) for a, b in common_rows(width, after))
    return max(min(a[0], b[0]) - max(a[1], b[1]) for a, b in pairs) / rows


@lru_cache(maxsize=1024)
def common_rows(one: int, other: int) -> tuple[tuple[int, int], ...]:
    """Returns which of `one` devices and which of `other` devices have rows in common if both divide them equally."""
    return tuple((a, b) for a in range(one) for b in range(a * other // one, -(-(a + 1) * other // one)))
