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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from meshwright.costs.memory.memory_classes import RESERVE, reserve_bytes
from meshwright.costs.stages import Charge, of_microbatch, shared_chain, stage_costs, stage_links
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import Plan, PlanStage, Rejected
from meshwright.ir.profile import Profile
from meshwright.ir.stage_cost import StageCost
from meshwright.ir.timeline import Timeline
from meshwright.planners._limits import NothingFitsError, PlanLimits
from meshwright.planners._pricing.uncounted_memory import added_to_wide
from meshwright.planners._replicated_partition import cuttings
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.wide_plans import table_plans
from meshwright.schedules import build
from meshwright.simulate import simulate

Stages = tuple[PlanStage, ...]
WORK = 400_000_000
"""The most entries that the exact tables of partitions may visit; above it planning would take minutes."""


def plan(
    *, profile: Profile, cluster: Cluster, microbatches: int | None, limits: PlanLimits, batch: int | None = None
) -> Iterator[Plan]:
    """Yields one plan: the shortest step over all numbers of stages and both directions."""
    if microbatches is None:
        raise MeshwrightError(f"spp plans a fixed number of microbatches, got batch={batch}", fix="microbatches=16, rows=4")
    problem = Problem(profile, cluster, limits, microbatches=microbatches, batch=None)
    candidates = list(dict.fromkeys(stage_candidates(problem, microbatches, limits.rows)))

    def costs_of(stages: Stages, charge: Charge) -> tuple[StageCost, ...]:
        chains = {stage.width: problem.chain(limits.rows, stage.width) for stage in stages}
        return stage_costs(profile, stages, cluster, rows=limits.rows, charge=charge, groups=problem.links, chains=chains)

    def executed(stages: Stages, charge: Charge) -> Timeline:
        order = build("listed", workers=len(stages), microbatches=microbatches)
        return simulate(order, costs_of(stages, charge), stage_links(stages, cluster, charge=charge, groups=problem.links))

    steps = [executed(stages, Charge.PAIRS).makespan_s for stages in candidates]
    ranked = sorted(zip(steps, candidates, strict=True), key=lambda pair: pair[0])  # stable: ties go to the one found first

    def held(stages: Stages, real: Timeline) -> list[float]:
        """The peak of each worker: what the simulation counts, temporary memory of layers, and buffers of communication."""
        transient = [
            float(max(problem.arrays(limits.rows, stage.width).transient[stage.first : stage.last + 1])) for stage in stages
        ]
        more = added_to_wide(problem, stages, costs_of(stages, Charge.ROWS), transient, microbatches)
        return [added.peak(0.0, real.peak_bytes(worker)) for worker, added in enumerate(more)]

    paper, stages, real, peaks = _first_that_fits(problem, ranked, lambda found: executed(found, Charge.ROWS), held)
    yield Plan(
        planner="spp",
        stages=stages,
        microbatches=microbatches,
        step_s=real.makespan_s,
        lower_bound_s=real.lower_bound_s,
        peak_bytes=peaks,
        paper_step_s=paper,
        parallel=keywords(stages, microbatches, costs_of(stages, Charge.ROWS)),
        name=f"listed, {_name(stages)}, {microbatches} microbatches",
        alternatives=tuple(
            Rejected(_name(other), step, f"{step / paper:.3f} times the chosen step, by the published costs")
            for step, other in ranked[1:]
            if other != stages
        ),
    )


def _first_that_fits(
    problem: Problem,
    ranked: list[tuple[float, Stages]],
    executed: Callable[[Stages], Timeline],
    held: Callable[[Stages, Timeline], list[float]],
) -> tuple[float, Stages, Timeline, tuple[float, ...]]:
    """Returns the best plan whose workers fit into the memory of their devices at every event, and their peaks."""
    least = float("inf")
    for paper, stages in ranked:
        real = executed(stages)
        caps = [float(problem.memory[list(stage.devices)].min()) for stage in stages]
        own = held(stages, real)
        peaks = tuple(peak + reserve_bytes(cap) for peak, cap in zip(own, caps, strict=True))
        if all(peak <= cap for peak, cap in zip(peaks, caps, strict=True)):
            return paper, stages, real, peaks
        least = min(least, max(own) / (1.0 - RESERVE))
    raise NothingFitsError(
        f"none of the {len(ranked)} plans of spp fits: the smallest needs {1.01 * least / 1e9:.4g} GB on a device",
        fix="--planner search, which knows recompute and ZeRO",
        needed_bytes=1.01 * least,
    )


def keywords(stages: Stages, microbatches: int, costs: Sequence[StageCost]) -> dict[str, object]:
    """Returns a plan as keywords of `Parallel`."""
    widths = [stage.width for stage in stages]
    return {
        "pp": len(stages),
        "schedule": "listed",
        "microbatches": microbatches,
        **({"width": widths} if max(widths) > 1 else {}),
        "stages": [stage.first for stage in stages[1:]],
        "ranks": [device for stage in stages for device in stage.devices],
        "costs": [asdict(cost) for cost in of_microbatch(costs, widths)],
    }


def small_enough(layers: int, devices: int) -> bool:
    """Whether the exact tables of partitions are used; larger problems use those of `_search/threshold_partition.py`."""
    return min(layers, devices) * devices**2 * layers * (layers + devices) <= WORK


def stage_candidates(problem: Problem, microbatches: int, rows: int | None) -> Iterator[Stages]:
    """Yields the plan with the least bottleneck for each number of stages, for both directions of the order of devices.

    A large problem has one plan for each of several limits on the bottleneck instead, whatever its number of stages.
    """
    count, limits = problem.devices, problem.limits
    exact = small_enough(problem.layers, count)
    widths = range(1, count + 1) if exact else ()
    shares = {width: shared_chain(problem.profile, rows, width) for width in widths if limits.allows(width, rows)}
    rates = problem.links.rates()
    for direction in (problem.order, problem.order[::-1]):
        if not exact:
            yield from table_plans(problem, direction, microbatches, rows)
            continue
        along = rates[direction][:, direction].tolist()
        for cutting in cuttings(shares, along, microbatches):
            yield tuple(
                PlanStage(layers[0], layers[-1], tuple(direction[place] for place in places))
                for layers, places in zip(cutting.layers, cutting.places, strict=True)
            )


def _name(stages: Stages) -> str:
    return f"{len(stages)} stages, widths {','.join(str(stage.width) for stage in stages)}"
