"""The one place where a profile, the stages of a plan and a cluster meet: what each stage costs, and the links between stages.

The devices that share a stage act as one worker. Each runs its rows at the same time, so a stage takes the time of the largest
share. Between two stages every pair of devices carries the rows that both have; the slowest pair decides.

    ROWS    what a run sends: the rows that two devices have in common, at most d / max(r, r')
    PAIRS   SPP's own charge: every pair carries d / (r r')
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

from meshwright.ir.cluster import Cluster, Duplex, Link
from meshwright.ir.layer_costs import ChainCost, Profile
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.ir.profile import StageCost


class Charge(StrEnum):
    """How a transfer between two groups of devices is charged."""

    ROWS = "rows"
    PAIRS = "pairs"


def shared_chain(profile: Profile, rows: int | None, width: int) -> ChainCost:
    """Returns what the layers cost on one of `width` devices that share a microbatch. Bytes stay those of the microbatch."""
    if not profile.rows:
        return profile.at().divided(width)
    whole, share = profile.at(rows), profile.at(-(-(rows or 0) // width))
    return whole.with_times(share)


def stage_costs(
    profile: Profile, stages: Sequence[PlanStage], cluster: Cluster, *, rows: int | None = None, charge: Charge = Charge.ROWS
) -> tuple[StageCost, ...]:
    """Returns what each stage of a plan costs on one of its devices."""
    found: list[StageCost] = []
    chains = {width: shared_chain(profile, rows, width) for width in {stage.width for stage in stages}}
    for number, stage in enumerate(stages):
        chain, width = chains[stage.width], stage.width
        after = stages[number + 1].width if number + 1 < len(stages) else 0
        lanes = max(width, after) if charge is Charge.ROWS else width * after
        parameters = sum(chain.parameter_bytes[layer] for layer in stage.layers)
        found.append(
            StageCost(
                forward_s=sum(chain.forward_s[layer] for layer in stage.layers),
                input_s=sum(chain.input_s[layer] for layer in stage.layers),
                weight_s=sum(chain.weight_s[layer] for layer in stage.layers),
                sync_s=_sync_s(cluster, stage.devices, parameters, charge),
                activation_bytes=sum(chain.saved_bytes[layer] for layer in stage.layers) / width,
                output_bytes=chain.output_bytes[stage.last] / lanes if after else 0.0,
                gradient_bytes=chain.gradient_bytes[stage.last] / lanes if after else 0.0,
                parameter_bytes=parameters,
            )
        )
    return tuple(found)


def _sync_s(cluster: Cluster, devices: Sequence[int], size: float, charge: Charge) -> float:
    if charge is Charge.ROWS:
        return cluster.all_reduce_s(devices, size)
    count = len(devices)
    return 2 * (count - 1) / count * size / cluster.slowest(devices).bytes_per_s if count > 1 and size else 0.0


def stage_links(stages: Sequence[PlanStage], cluster: Cluster, *, charge: Charge = Charge.ROWS) -> Cluster:
    """Returns the links between the groups of devices, each as one worker. SPP has no latency, and links in one direction."""
    links: dict[tuple[int, int], Link] = {}
    for number, (one, other) in enumerate(pairwise(stages)):
        slowest = cluster.slowest(one.devices, other.devices)
        links[number, number + 1] = Link(0.0, slowest.bytes_per_s) if charge is Charge.PAIRS else slowest
    return Cluster(Link(), links, Duplex.HALF if charge is Charge.PAIRS else cluster.duplex)
