"""A candidate as something that can be simulated: costs of its stages, links between its workers, its memory limits.

The quick sweep gives the time of a step and the most activations of each worker. The engine proves and simulates what is chosen;
its memory curve decides whether a plan fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from meshwright.costs.memory_classes import (
    largest_transient,
    memory_use,
    optimizer_state,
    reserve_bytes,
    stage_parameters,
    static_bytes,
)
from meshwright.costs.stages import of_microbatch, stage_links, sum_seconds
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import MemoryUse, PlanStage
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.ir.timeline import Timeline
from meshwright.passes.check import prove
from meshwright.planners._search.candidates import Candidate, Enumerator, WidePlan
from meshwright.planners._search.families import Family
from meshwright.planners._search.grid_layout import stage_slowness, sync_groups, worker_links, worker_slowness
from meshwright.planners._search.group_bounds import placement_of
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import TensorChoice
from meshwright.schedules import build, parameters
from meshwright.simulate.quick_memory import activation_peaks
from meshwright.simulate.quick_sweep import QuickProgram
from meshwright.simulate.simulator import simulate_with_peaks


@dataclass
class Priced:
    """What the simulation of a plan needs, and what the plan says."""

    plan: Candidate | WidePlan
    family: Family
    workers: int
    microbatches: int
    costs: tuple[StageCost, ...]
    links: Cluster
    stages: tuple[PlanStage, ...]
    capacity: tuple[float, ...]
    transient: tuple[float, ...]
    static: tuple[float, ...]
    update_s: float
    tensor_s: float
    sharding: Sharding
    copies: int
    parallel: Mapping[str, Any]
    step_s: float = float("inf")
    peak_bytes: tuple[float, ...] = ()

    @property
    def keywords(self) -> dict[str, Any]:
        """The plan as keywords of `Parallel`, with the costs of whole microbatches: lists are lowered and simulated with them."""
        wide = isinstance(self.plan, WidePlan)
        costs = of_microbatch(self.costs, [stage.width for stage in self.stages]) if wide else self.costs
        return {**self.parallel, "costs": [asdict(cost) for cost in costs]}

    @property
    def over_bytes(self) -> float:
        """By how much the tightest worker misses its memory; 0 if all fit."""
        return max([0.0, *(peak - cap for peak, cap in zip(self.peak_bytes, self.capacity, strict=True))])


class Pricer:
    """Prices and simulates candidates, and keeps schedules that several of them use."""

    def __init__(self, problem: Problem, enumerator: Enumerator) -> None:
        self.problem, self.enumerator = problem, enumerator
        self._programs: dict[tuple[object, ...], QuickProgram] = {}
        self.simulated = self.proved = self.actions = 0

    def quick(self, plan: Candidate | WidePlan) -> Priced | None:
        """Returns a plan with its time and its memory; None if its schedule cannot be built at these sizes."""
        priced = self.price(plan)
        try:
            program = self._program(priced)
        except MeshwrightError:
            return None
        self.simulated += 1
        self.actions += 2 * priced.workers * priced.microbatches * priced.family.chunks
        if program.lists is None:
            self._simulated(priced, self.schedule(priced))
            return priced
        priced.step_s = program.makespan_s(priced.costs, priced.links) + priced.update_s
        held = activation_peaks(program.lists, priced.costs)
        sums = zip(priced.static, held, priced.transient, priced.capacity, strict=True)
        priced.peak_bytes = tuple(s + h + t + reserve_bytes(c) for s, h, t, c in sums)
        return priced

    def schedule(self, priced: Priced) -> Schedule:
        """Builds the schedule of a plan."""
        costs: dict[str, Any] = {"costs": priced.costs} if shaped_by_costs(priced.family) else {}
        if costs and priced.family.schedule in ("listed", "onef1b"):
            costs["cluster"] = priced.links
        given: dict[str, Any] = {**priced.family.options, **costs}
        built = build(priced.family.schedule, workers=priced.workers, microbatches=priced.microbatches, **given)
        return replace(built, sharding=priced.sharding)

    def _program(self, priced: Priced) -> QuickProgram:
        key = (priced.family, priced.workers, priced.microbatches, priced.sharding)
        if shaped_by_costs(priced.family):
            return QuickProgram(self.schedule(priced))
        if key not in self._programs:
            self._programs[key] = QuickProgram(self.schedule(priced))
        return self._programs[key]

    def engine(self, priced: Priced) -> tuple[Timeline, tuple[MemoryUse, ...]]:
        """Proves a plan and simulates it with the engine: its timeline, and its memory by class."""
        schedule = self.schedule(priced)
        prove(schedule)
        self.proved += 1
        return self._simulated(priced, schedule)

    def _simulated(self, priced: Priced, schedule: Schedule) -> tuple[Timeline, tuple[MemoryUse, ...]]:
        timeline, kinds = simulate_with_peaks(schedule, priced.costs, priced.links, copies=priced.copies)
        uses = tuple(
            memory_use(of_worker, transient=scratch, capacity=cap)
            for of_worker, scratch, cap in zip(kinds, priced.transient, priced.capacity, strict=True)
        )
        priced.step_s = timeline.makespan_s + priced.update_s
        priced.peak_bytes = tuple(use.total for use in uses)
        return timeline, uses

    def price(self, plan: Candidate | WidePlan) -> Priced:
        """Returns the costs of a plan."""
        return self._price_wide(plan) if isinstance(plan, WidePlan) else self._price_grid(plan)

    def _price_grid(self, plan: Candidate) -> Priced:
        problem, tp = self.problem, plan.tensor.tp
        placement = placement_of(plan.family, plan.pp)
        found = self.enumerator.grid_of(plan)
        timed = self.enumerator.timed(plan.rows, plan.share, plan.tensor)
        slow = stage_slowness(placement, worker_slowness(problem, found))
        groups = sync_groups(found, placement)
        arrays = problem.arrays(plan.rows, plan.share)
        whole_copy = 1 if plan.tensor.tensor == "line" and not plan.tensor.sequence else tp
        costs, stages, sizes, scratch = [], [], [], []
        for s, (first, end) in enumerate(zip((0, *plan.ends[:-1]), plan.ends, strict=True)):
            layers = range(first, end)
            size = stage_parameters(problem.profile, layers) / tp
            call = float(problem.launch[groups[s]].max())
            forward = slow[s] * (timed.sums["forward"][end] - timed.sums["forward"][first]) + call
            is_last = s == placement.stages - 1
            output = 0.0 if is_last else float(arrays.output[end - 1]) / whole_copy
            sync_s, gather_s = sum_seconds(problem.links, groups[s].tolist(), size, divided=plan.zero != "replicated")
            costs.append(
                StageCost(
                    forward_s=forward,
                    input_s=slow[s] * (timed.sums["input"][end] - timed.sums["input"][first]) + call,
                    weight_s=slow[s] * (timed.sums["weight"][end] - timed.sums["weight"][first]),
                    recompute_s=forward if plan.recompute else 0.0,
                    sync_s=sync_s,
                    gather_s=gather_s,
                    activation_bytes=timed.sums["saved"][end] - timed.sums["saved"][first],
                    output_bytes=output,
                    gradient_bytes=output,
                    parameter_bytes=size,
                    optimizer_bytes=optimizer_state(problem.profile, size),
                )
            )
            holders = sorted({placement.teams[r][s][0][0] for r in range(placement.replicas)})
            devices = tuple(int(d) for d in found.devices[holders].ravel())
            stages.append(PlanStage(first, end - 1, devices, 1.0 if plan.recompute else 0.0))
            sizes.append(size)
            scratch.append(largest_transient(arrays.transient.tolist(), layers) / tp)
        shares = plan.dp * plan.family.replicas
        held = [[s for _, s in pairs] for pairs in placement.held]
        state = [optimizer_state(problem.profile, size) for size in sizes]
        static = tuple(sum(static_bytes(sizes[s], state[s], zero=plan.zero, shares=shares) for s in of) for of in held)
        largest = max(sum(sizes[s] for s in of) for of in held) / (1 if plan.zero == "replicated" else shares)
        tensor_s = plan.microbatches * max(
            sum(timed.sums["tensor"][plan.ends[s]] - timed.sums["tensor"][(0, *plan.ends)[s]] for s in of) for of in held
        )
        return Priced(
            plan,
            plan.family,
            plan.pp,
            plan.microbatches,
            tuple(costs),
            worker_links(problem, found, placement),
            tuple(stages),
            tuple(problem.memory[found.devices].min(axis=(1, 2)).tolist()),
            tuple(max(scratch[s] for s in of) for of in held),
            static,
            problem.update_s(largest, int(found.devices[0, 0, 0])),
            tensor_s / plan.family.replicas,
            Sharding.NONE if plan.zero == "replicated" else Sharding(plan.zero),
            plan.dp,
            _keywords(plan, found.ranks),
        )

    def _price_wide(self, plan: WidePlan) -> Priced:
        problem = self.problem
        stages = tuple(replace(stage, recompute=float(plan.recompute)) for stage in plan.stages)
        costs = problem.stage_costs(stages, plan.rows)
        transient = [
            max(problem.arrays(plan.rows, stage.width).transient[stage.first : stage.last + 1], default=0.0) for stage in stages
        ]
        static = [static_bytes(c.parameter_bytes, c.optimizer_bytes, zero="replicated", shares=1) for c in costs]
        update = max(problem.update_s(c.parameter_bytes, stage.devices[0]) for c, stage in zip(costs, stages, strict=True))
        return Priced(
            plan,
            plan.family,
            len(stages),
            plan.microbatches,
            costs,
            stage_links(stages, problem.cluster, groups=problem.links),
            stages,
            tuple(float(problem.memory[list(stage.devices)].min()) for stage in stages),
            tuple(map(float, transient)),
            tuple(static),
            update,
            0.0,
            Sharding.NONE,
            1,
            _wide_keywords(plan, stages),
        )


def _keywords(plan: Candidate, ranks: tuple[int, ...]) -> dict[str, Any]:
    return {
        "pp": plan.pp,
        "dp": plan.dp,
        "schedule": plan.family.schedule,
        "microbatches": plan.microbatches,
        **({"options": dict(plan.family.options)} if plan.family.options else {}),
        **({"dp_mode": plan.zero} if plan.zero != "replicated" else {}),
        **({"recompute": "inline"} if plan.recompute else {}),
        **plan.tensor.keywords(),
        "stages": list(plan.ends[:-1]),
        "ranks": list(ranks),
    }


def _wide_keywords(plan: WidePlan, stages: tuple[PlanStage, ...]) -> dict[str, Any]:
    return {
        "pp": len(stages),
        "schedule": plan.family.schedule,
        "microbatches": plan.microbatches,
        **({"options": dict(plan.family.options)} if plan.family.options else {}),
        **({"recompute": "inline"} if plan.recompute else {}),
        **({"width": [stage.width for stage in stages]} if any(stage.width > 1 for stage in stages) else {}),
        "stages": [stage.first for stage in stages[1:]],
        "ranks": [device for stage in stages for device in stage.devices],
    }


@cache
def shaped_by_costs(family: Family) -> bool:
    """Whether the order of a schedule depends on costs, which are then part of the plan."""
    shaped = {"zbv", "zero_bubble", "chimera", "listed", "onef1b"}
    options = family.options
    uses = {"zero_bubble": options.get("variant") == "auto", "chimera": bool(options.get("split"))}
    uses["onef1b"] = "memory" in options
    uses["listed"] = options.get("strict") is False or "memory" in options
    return family.schedule in shaped and "costs" in parameters(family.schedule) and uses.get(family.schedule, True)


def tensor_of(plan: Candidate | WidePlan) -> TensorChoice:
    """The tensor ranks of a plan."""
    return plan.tensor if isinstance(plan, Candidate) else TensorChoice(1)
