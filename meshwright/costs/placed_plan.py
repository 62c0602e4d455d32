"""A plan on the devices that its ranks name: the links between its workers, and what its sums of gradients take.

Data-parallel copies run the same lists and wait for each other in every step. So the slowest copy decides what a message between
two workers takes, and for tensor-parallel workers the slowest of their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from meshwright.costs.gradient_sums import sum_seconds, sums_beside
from meshwright.ir.action import Transfer
from meshwright.ir.analysis.reduction_groups import holders
from meshwright.ir.cluster import Cluster, Link
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost


def placed_links(plan: Parallel, schedule: Schedule, cluster: Cluster) -> Cluster:
    """Returns the links between the workers of a plan's lowered schedule. Messages of a step divide network cards among them."""
    ranks, workers, tp = _ranks(plan), schedule.workers, plan.tp
    if plan.copies == tp == 1 and not cluster.has_cards:
        return cluster.placed(ranks)
    ends = sorted(
        {
            (worker, entry.peer)
            for worker, entries in enumerate(schedule.lists)
            for entry in entries
            if isinstance(entry, Transfer) and entry.sends
        }
    )
    first = [workers * copy * tp + coordinate for copy in range(plan.copies) for coordinate in range(tp)]
    pairs = [(ranks[a * tp + seat], ranks[b * tp + seat]) for a, b in ends for seat in first]
    used = iter(cluster.shared_links(pairs) if cluster.has_cards else [cluster.between(*pair) for pair in pairs])
    links = {pair: reduce(Link.slower, (next(used) for _ in first), Link()) for pair in ends}
    return Cluster(Link(), links, cluster.duplex)


def placed_costs(plan: Parallel, schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster) -> tuple[StageCost, ...]:
    """Returns the costs of a plan's stages, with the time of sums between the devices that its ranks name."""
    ranks = _ranks(plan)
    cluster.refuse_missing(ranks)
    groups = [sorted(ranks[seat * plan.tp] for seat in holders(schedule, plan.copies, stage)) for stage in range(len(costs))]
    found: list[StageCost] = []
    for number, (cost, beside) in enumerate(zip(costs, sums_beside(cluster, groups, plan.tp), strict=True)):
        size = cost.parameter_bytes - cost.tied_bytes
        sync_s, gather_s = sum_seconds(cluster, groups[number], size, divided=plan.mode.is_zero, beside=beside)
        tied_s = _tied_s(costs, groups, number, cluster, plan.tp) if cost.tied_s else 0.0
        found.append(replace(cost, sync_s=sync_s + tied_s, gather_s=gather_s, tied_s=tied_s))
    return tuple(found)


def _tied_s(costs: Sequence[StageCost], groups: Sequence[Sequence[int]], first: int, cluster: Cluster, tp: int) -> float:
    """Returns the time to add up the parameters that a stage shares with later ones, as one sum over all of their devices."""
    holders = sorted(
        {rank for cost, group in zip(costs[first:], groups[first:], strict=True) if cost.tied_bytes for rank in group}
    )
    return cluster.all_reduce_s(holders, costs[first].tied_bytes, beside=tp)


def _ranks(plan: Parallel) -> tuple[int, ...]:
    return plan.ranks or tuple(range(plan.processes))
