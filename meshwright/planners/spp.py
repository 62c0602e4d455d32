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
from dataclasses import replace

from meshwright.costs.memory.memory_classes import RESERVE, reserve_bytes
from meshwright.costs.stages import Charge, stage_costs, stage_links
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import MemoryUse, Plan, PlanStage, Rejected
from meshwright.ir.profile import Profile
from meshwright.ir.timeline import Timeline
from meshwright.planners._answer.chosen import causes, notes
from meshwright.planners._limits import MOST_MICROBATCHES, NothingFitsError, PlanLimits
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.pricing import Pricer
from meshwright.planners._refused_requests import no_split
from meshwright.planners._replicated_partition import cuttings
from meshwright.planners._search.candidate_plans import WidePlan
from meshwright.planners._search.families import families
from meshwright.planners._search.plan_bounds import PlanBounds
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
    """Yields one plan: the shortest step over all numbers of stages and both directions; of a batch, also over its rows."""
    problem = Problem(profile, cluster, limits, microbatches=microbatches, batch=batch)
    if microbatches is not None:
        yield _best_stages(problem, microbatches)
    else:
        yield _best_rows(problem)


def _best_rows(problem: Problem) -> Plan:
    """Returns the plan with the shortest step over the rows of a microbatch. SPP itself takes microbatches as given.

    It begins with the most rows, and ends as soon as microbatches of fewer rows take longer.
    """
    assert problem.batch is not None
    best: Plan | None = None
    errors: list[NothingFitsError] = []
    ways = [(rows, problem.batch // rows) for rows in reversed(problem.row_choices)]
    for rows, count in ((rows, count) for rows, count in ways if count <= MOST_MICROBATCHES):
        fixed = replace(problem.limits, rows=rows)
        try:
            plan = _best_stages(Problem(problem.profile, problem.cluster, fixed, microbatches=count, batch=None), count)
        except NothingFitsError as error:
            errors.append(error)
            continue
        if best is not None and plan.step_s >= best.step_s:
            break
        best = plan
    if best is not None:
        return best
    raise min(errors, key=lambda error: error.needed_bytes) if errors else no_split(problem)


def _best_stages(problem: Problem, microbatches: int) -> Plan:
    """Returns the plan with the shortest step over all numbers of stages and both directions."""
    limits = problem.limits
    candidates = list(dict.fromkeys(stage_candidates(problem, microbatches, limits.rows)))
    steps = [_paper_s(problem, stages, microbatches) for stages in candidates]
    ranked = sorted(zip(steps, candidates, strict=True), key=lambda pair: pair[0])  # stable: ties go to the one found first
    paper, priced, timeline, uses = _first_that_fits(problem, ranked, microbatches)
    return Plan(
        planner="spp",
        stages=priced.stages,
        microbatches=microbatches,
        step_s=priced.step_s,
        lower_bound_s=timeline.lower_bound_s + priced.update_s,
        peak_bytes=priced.peak_bytes,
        paper_step_s=paper,
        parallel=priced.keywords,
        memory=uses,
        causes=causes(priced, timeline),
        notes=notes(problem, priced.stages, tensor=False),
        error=problem.profile.error,
        name=f"listed, {_name(priced.stages)}, "
        + (f"{microbatches} x {limits.rows} rows" if limits.rows else f"{microbatches} microbatches"),
        alternatives=tuple(
            Rejected(_name(other), step, f"{step / paper if paper else 1.0:.3f} times the chosen step, by the published costs")
            for step, other in _without_doubles(ranked, (paper, priced.stages))
        ),
    )


def _without_doubles(ranked: list[tuple[float, Stages]], chosen: tuple[float, Stages]) -> Iterator[tuple[float, Stages]]:
    """Yields the other plans; those of the two directions that differ in nothing but their devices count as one."""
    seen = {(f"{chosen[0]:.9g}", _name(chosen[1]))}
    for step, stages in ranked:
        if (found := (f"{step:.9g}", _name(stages))) not in seen:
            seen.add(found)
            yield step, stages


def _paper_s(problem: Problem, stages: Stages, microbatches: int) -> float:
    """The step of a plan by the published costs."""
    rows, charge = problem.limits.rows, Charge.PAIRS
    chains = {stage.width: problem.chain(rows, stage.width) for stage in stages}
    costs = stage_costs(problem.profile, stages, problem.cluster, rows=rows, charge=charge, groups=problem.links, chains=chains)
    order = build("listed", workers=len(stages), microbatches=microbatches)
    return simulate(order, costs, stage_links(stages, problem.cluster, charge=charge, groups=problem.links)).makespan_s


def _first_that_fits(
    problem: Problem, ranked: list[tuple[float, Stages]], microbatches: int
) -> tuple[float, Priced, Timeline, tuple[MemoryUse, ...]]:
    """Returns the best plan whose workers fit into the memory of their devices at every event, priced as the search does it."""
    pricer, (listed,) = Pricer(problem, PlanBounds(problem)), families("listed")
    least = float("inf")
    for paper, stages in ranked:
        priced = pricer.price(WidePlan(stages, listed, microbatches, problem.limits.rows))
        timeline, uses = pricer.engine(priced, bounded=True)
        if priced.over_bytes <= 0:
            return paper, priced, timeline, uses
        own = (peak - reserve_bytes(cap) for peak, cap in zip(priced.peak_bytes, priced.capacity, strict=True))
        least = min(least, max(own) / (1.0 - RESERVE))
    raise NothingFitsError(
        f"none of the {len(ranked)} plans of spp fits: the smallest needs {1.01 * least / 1e9:.4g} GB on a device",
        fix="--planner search",
        needed_bytes=1.01 * least,
    )


def small_enough(layers: int, devices: int) -> bool:
    """Whether the exact tables of partitions are used; larger problems use those of `_search/cuts/threshold_partition.py`."""
    return min(layers, devices) * devices**2 * layers * (layers + devices) <= WORK


def stage_candidates(problem: Problem, microbatches: int, rows: int | None) -> Iterator[Stages]:
    """Yields the plan with the least bottleneck for each number of stages, for both directions of the order of devices.

    A large problem has one plan for each of several limits on the bottleneck instead, whatever its number of stages.
    """
    count, limits = problem.devices, problem.limits
    exact = small_enough(problem.layers, count)
    widths = range(1, count + 1) if exact else ()
    shares = {width: problem.profile.shared(rows, width) for width in widths if limits.allows(width, rows)}
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
