"""SPP (Luo et al., INFOCOM'22): stages, replication and mapping to devices over any topology, with its own execution order.

1. RDO orders the devices so that well connected ones are neighbours (`_device_order.py`).
2. PRM finds, for every number of stages, the cuts and replicas with the least bottleneck in that order, exactly
   (`_replicated_partition.py`).
3. PE executes each of these plans in the order of `schedules/listed.py`; the plan with the shortest step wins.

The order of devices is tried in both directions: which end the first stage starts from matters as much as the order. The
published cost model charges d / (r r') between two groups of devices (`paper_step_s`). Plans are chosen by it, and priced again
with the rows that really cross (`step_s`).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.costs.stages import Charge, shared_chain, stage_costs, stage_links
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.layer_costs import Profile
from meshwright.ir.plan.chosen_plan import Plan, PlanStage, Rejected
from meshwright.ir.timeline import Timeline
from meshwright.planners._device_order import device_order
from meshwright.planners._limits import PlanLimits
from meshwright.planners._replicated_partition import cuttings
from meshwright.schedules import build
from meshwright.simulate import simulate

Stages = tuple[PlanStage, ...]
WORK = 4_000_000_000
"""The most entries that the tables of partitions may visit; above it planning would take minutes."""


def plan(*, profile: Profile, cluster: Cluster, microbatches: int, limits: PlanLimits) -> Iterator[Plan]:
    """Yields one plan: the shortest step over all numbers of stages and both directions."""
    layers, devices = len(profile.layers), cluster.size
    if min(layers, devices) * devices**2 * layers * (layers + devices) > WORK:
        raise MeshwrightError(
            f"spp is exact and too slow for {layers} layers on {devices} devices",
            fix="fewer units: merge layers of the profile, or plan for one of several equal parts of the cluster",
        )
    candidates = list(_candidates(profile, cluster, microbatches, limits))

    def executed(stages: Stages, charge: Charge) -> Timeline:
        costs = stage_costs(profile, stages, cluster, rows=limits.rows, charge=charge)
        order = build("listed", workers=len(stages), microbatches=microbatches)
        return simulate(order, costs, stage_links(stages, cluster, charge=charge))

    steps = [executed(stages, Charge.PAIRS).makespan_s for stages in candidates]
    ranked = sorted(zip(steps, candidates, strict=True), key=lambda pair: pair[0])  # stable: ties go to the one found first
    paper, stages = ranked[0]
    real = executed(stages, Charge.ROWS)
    yield Plan(
        planner="spp",
        stages=stages,
        microbatches=microbatches,
        step_s=real.makespan_s,
        lower_bound_s=real.lower_bound_s,
        peak_bytes=tuple(real.peak_bytes(worker) for worker in range(real.workers)),
        paper_step_s=paper,
        alternatives=tuple(
            Rejected(_name(other), step, f"{step / paper:.3f} times the chosen step, by the published costs")
            for step, other in ranked[1:]
            if other != stages
        ),
    )


def _candidates(profile: Profile, cluster: Cluster, microbatches: int, limits: PlanLimits) -> Iterator[Stages]:
    """Yields the plan with the least bottleneck for each number of stages, for both directions of the order of devices."""
    count = cluster.size
    shares = {width: shared_chain(profile, limits.rows, width) for width in range(1, count + 1) if limits.allows(width)}
    rates = [[cluster.between(a, b).bytes_per_s if a != b else float("inf") for b in range(count)] for a in range(count)]
    order = device_order(rates)
    for direction in (order, order[::-1]):
        along = [[rates[a][b] for b in direction] for a in direction]
        for cutting in cuttings(shares, along, microbatches):
            yield tuple(
                PlanStage(layers[0], layers[-1], tuple(direction[place] for place in places))
                for layers, places in zip(cutting.layers, cutting.places, strict=True)
            )


def _name(stages: Stages) -> str:
    return f"{len(stages)} stages, widths {','.join(str(stage.width) for stage in stages)}"
