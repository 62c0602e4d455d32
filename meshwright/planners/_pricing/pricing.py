"""A candidate as something that can be simulated: costs of its stages, links between its workers, its memory limits.

The quick sweep gives the time of a step and the most activations of each worker. The engine proves and simulates what is chosen;
its memory curve decides whether a plan fits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.costs.gradient_sums import SumCost, stage_sums
from meshwright.costs.memory.memory_classes import gradient_bytes, memory_use, optimizer_state, reserve_bytes, static_bytes
from meshwright.costs.stages import stage_links
from meshwright.errors import MeshwrightError
from meshwright.ir.files.schedule_json import schedule_to_json
from meshwright.ir.plan.chosen_plan import MemoryUse, PlanStage
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.ir.stage_cost import StageCost
from meshwright.ir.timeline import Timeline
from meshwright.planners._pricing.devices_apart import kinds_apart, looks_apart
from meshwright.planners._pricing.priced_bound import priced_bound_s
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.programs import Programs
from meshwright.planners._pricing.uncounted_memory import added_bytes, added_to_wide
from meshwright.planners._search.candidate_plans import Candidate, WidePlan
from meshwright.planners._search.effort import LOOKED, SMALL
from meshwright.planners._search.families import shaped_by_links
from meshwright.planners._search.grid_layout import (
    grid_stages,
    stage_slowness,
    sync_groups,
    worker_links,
    worker_slowness,
)
from meshwright.planners._search.group_bounds import placement_of
from meshwright.planners._search.plan_bounds import PlanBounds
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import TensorChoice
from meshwright.simulate.quick_memory import activation_peaks
from meshwright.simulate.simulator import proved_with_peaks

MESSAGES = 4
"""About how many messages of each kind a worker may hold at once."""


class Pricer:
    """Prices and simulates candidates, and keeps schedules that several of them use."""

    def __init__(self, problem: Problem, bounds: PlanBounds) -> None:
        self.problem, self.bounds = problem, bounds
        self._programs = Programs()
        self._raised: dict[Candidate | WidePlan, Priced] = {}
        self.simulated = self.proved = self.actions = self.looked = 0

    def raised(self, plan: Candidate) -> Candidate:
        """Returns a plan with a bound on its step that knows its links: higher than the one that it was enumerated with."""
        priced = self.price(plan)
        most = self.bounds.alive(plan.family, plan.pp, plan.microbatches)[1]
        placement = placement_of(plan.family, plan.pp)
        bound = priced_bound_s(
            placement,
            priced.costs,
            priced.links,
            plan.microbatches,
            split=plan.family.split,
            early=plan.family.early,
            most=most.tolist(),
        )
        found = replace(plan, bound_s=max(plan.bound_s, bound + priced.update_s), sharp=True)
        if priced.actions <= SMALL:
            self._raised[found] = replace(priced, plan=found)
        return found

    def quick(self, plan: Candidate | WidePlan) -> Priced | None:
        """Returns a plan with its time and its memory; None if its schedule cannot be built at these sizes."""
        priced = self._raised.pop(plan, None) or self.price(plan)
        try:
            program = self._programs.of(priced)
        except MeshwrightError:
            return None
        self.simulated += 1
        self.actions += priced.actions
        if program.lists is None:
            self.engine(priced)
            return priced
        times = program.times(priced.costs, priced.links)
        priced.step_s = times.makespan_s + priced.update_s
        shares = priced.copies * priced.family.replicas
        zero = "replicated" if priced.sharding is Sharding.NONE else priced.sharding.value
        gradients = [gradient_bytes(cost.parameter_bytes, zero=zero, shares=shares) for cost in priced.costs]
        held = activation_peaks(program.lists, priced.costs, gradients, priced.widths)
        late = _waiting_bytes(priced, times.computed_s)
        sums = zip(priced.static, held, late, priced.added, priced.capacity, strict=True)
        priced.peak_bytes = tuple(more.peak(s, h + w) + reserve_bytes(c) for s, h, w, more, c in sums)
        priced.waiting_bytes = tuple(late)
        return priced

    def look_again(self, priced: Priced, best_s: float) -> None:
        """Lets the engine decide whether a plan fits if estimates cannot, and it would be the best one."""
        unknown = priced.may_fit or (priced.over_bytes <= 0 and self._may_not_fit(priced))
        if unknown and priced.step_s < best_s and priced.actions <= SMALL and self.looked < LOOKED:
            self.looked += priced.actions
            self.engine(priced)
            priced.waiting_bytes = ()

    def _may_not_fit(self, priced: Priced) -> bool:
        """Whether messages, which estimates leave out, could exceed the memory of a worker: several in each direction."""
        costs, held = priced.costs, placement_of(priced.family, priced.workers).held
        crossing = [cost.output_bytes + cost.gradient_bytes for cost in costs]
        some = [MESSAGES * sum(crossing[s] + (crossing[s - 1] if s else 0.0) for _, s in pairs) for pairs in held]
        return any(peak + more > cap for peak, more, cap in zip(priced.peak_bytes, some, priced.capacity, strict=True))

    def schedule(self, priced: Priced) -> Schedule:
        """Builds the schedule of a plan."""
        return self._programs.of(priced).schedule

    def engine(self, priced: Priced, *, bounded: bool = False) -> tuple[Timeline, tuple[MemoryUse, ...]]:
        """Proves a plan and simulates it with the engine: its timeline, if asked for with a bound, and its memory by class."""
        timeline, kinds = proved_with_peaks(
            self.schedule(priced),
            priced.costs,
            priced.links,
            copies=priced.copies,
            bounded=bounded,
            widths=priced.widths,
        )
        if looks_apart(self.problem, priced):
            apart = kinds_apart(self.problem, priced, self.schedule(priced))
            kinds = tuple(max(pair, key=lambda kind: sum(kind.values())) for pair in zip(kinds, apart, strict=True))
        self.proved += 1
        uses = tuple(
            memory_use(of_worker, more=more, capacity=cap)
            for of_worker, more, cap in zip(kinds, priced.added, priced.capacity, strict=True)
        )
        priced.step_s = timeline.makespan_s + priced.update_s
        priced.peak_bytes = tuple(use.total for use in uses)
        return timeline, uses

    def keep_order(self, priced: Priced) -> None:
        """Stores the order itself in a plan whose order was made for its links: a run does not know them."""
        if shaped_by_links(priced.family):
            kept = {key: value for key, value in priced.parallel.items() if key not in ("schedule", "options", "pp")}
            priced.parallel = {**kept, "order": json.loads(schedule_to_json(self.schedule(priced)))}

    def price(self, plan: Candidate | WidePlan) -> Priced:
        """Returns the costs of a plan."""
        return self._price_wide(plan) if isinstance(plan, WidePlan) else self._price_grid(plan)

    def _price_grid(self, plan: Candidate) -> Priced:
        problem, tp = self.problem, plan.tensor.tp
        placement = placement_of(plan.family, plan.pp)
        found = self.bounds.grid_of(plan)
        sums = self.bounds.timed(plan.rows, plan.share, plan.tensor).sums
        arrays = problem.arrays(plan.rows, plan.share)
        first, end = np.array((0, *plan.ends[:-1])), np.array(plan.ends)
        slow = stage_slowness(placement, worker_slowness(problem, found))
        groups = sync_groups(found, placement)
        call = [float(problem.launch[group].max()) for group in groups] if problem.launch.any() else [0.0] * len(groups)
        forward = slow * (sums["forward"][end] - sums["forward"][first]) + call
        output = arrays.output[end - 1] / (1 if plan.tensor.copies_residual else tp)
        output[-1] = 0.0
        sizes = problem.stage_parameters(first, end) / tp
        added = stage_sums(
            problem.ties,
            problem.cluster,
            problem.links,
            [range(a, b) for a, b in zip(first.tolist(), plan.ends, strict=True)],
            [group.tolist() for group in groups],
            sizes.tolist(),
            divided=plan.zero != "replicated",
            tp=tp,
        )
        columns = {
            "forward_s": forward,
            "input_s": slow * (sums["input"][end] - sums["input"][first]) + call,
            "weight_s": slow * (sums["weight"][end] - sums["weight"][first]),
            "recompute_s": forward * plan.family.recompute_shares(len(end), plan.recompute),
            **{name: np.array(column) for name, column in zip(SumCost._fields, zip(*added, strict=True), strict=True)},
            "activation_bytes": sums["saved"][end] - sums["saved"][first],
            "output_bytes": output,
            "gradient_bytes": output,
            "parameter_bytes": sizes,
            "optimizer_bytes": optimizer_state(problem.profile, 1.0) * sizes,
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        costs = tuple(StageCost(**dict(zip(columns, row, strict=True))) for row in rows)
        shares = plan.dp * plan.family.replicas
        held = [sorted({s for _, s in pairs}) for pairs in placement.held]
        static = [static_bytes(c.parameter_bytes, c.optimizer_bytes, zero=plan.zero, shares=shares) for c in costs]
        divided = 1 if plan.zero == "replicated" else shares
        updated = np.array([sum(costs[s].parameter_bytes for s in of) / divided for of in held])
        scratch = (np.maximum.reduceat(arrays.transient, first) / tp).tolist()
        tensor_s = (sums["tensor"][end] - sums["tensor"][first]).tolist()
        return Priced(
            plan,
            plan.family,
            plan.pp,
            plan.microbatches,
            costs,
            worker_links(problem, found, placement),
            tuple(problem.memory[found.devices].min(axis=(1, 2)).tolist()),
            added_bytes(problem, plan, placement, found, costs, scratch),
            tuple(sum(static[s] for s in of) for of in held),
            problem.update_s(updated, found.devices),
            plan.microbatches * max(sum(tensor_s[s] for s in of) for of in held) / plan.family.replicas,
            Sharding.NONE if plan.zero == "replicated" else Sharding(plan.zero),
            plan.dp,
            lambda: (grid_stages(found, placement, plan), _keywords(plan, found.ranks)),
        )

    def _price_wide(self, plan: WidePlan) -> Priced:
        problem = self.problem
        stages = plan.stages
        costs = problem.stage_costs(stages, plan.rows)
        transient = [
            max(problem.arrays(plan.rows, stage.width).transient[stage.first : stage.last + 1], default=0.0) for stage in stages
        ]
        static = [static_bytes(c.parameter_bytes, c.optimizer_bytes, zero="replicated", shares=1) for c in costs]
        update = problem.update_s(np.array([c.parameter_bytes for c in costs]), [stage.devices for stage in stages])
        return Priced(
            plan,
            plan.family,
            len(stages),
            plan.microbatches,
            costs,
            stage_links(stages, problem.cluster, groups=problem.links),
            tuple(float(problem.memory[list(stage.devices)].min()) for stage in stages),
            added_to_wide(problem, stages, costs, list(map(float, transient)), plan.microbatches),
            tuple(static),
            update,
            0.0,
            Sharding.NONE,
            1,
            lambda: (stages, _wide_keywords(plan, stages)),
        )


def _keywords(plan: Candidate, ranks: tuple[int, ...]) -> dict[str, Any]:
    return {
        "pp": plan.pp,
        "dp": plan.dp,
        "schedule": plan.family.schedule,
        "microbatches": plan.microbatches,
        **({"options": dict(plan.family.options)} if plan.family.options else {}),
        **({"dp_mode": plan.zero} if plan.zero != "replicated" else {}),
        **({"recompute": "inline"} if plan.recompute and not plan.family.early else {}),
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
        **({"recompute": "inline"} if plan.recompute and not plan.family.early else {}),
        **({"width": [stage.width for stage in stages]} if any(stage.width > 1 for stage in stages) else {}),
        "stages": [stage.first for stage in stages[1:]],
        "ranks": [device for stage in stages for device in stage.devices],
    }


def _waiting_bytes(priced: Priced, computed_s: Sequence[float]) -> list[float]:
    """The gradients that wait for their sums when a worker has computed all, if each is added up alone; at least one a stage."""
    if not priced.sharding.sums_singly:
        return [0.0] * priced.workers
    placement, costs = placement_of(priced.family, priced.workers), priced.costs
    each = priced.microbatches / placement.replicas
    return [
        sum(costs[s].parameter_bytes * max(1.0, each - time / (costs[s].sync_s or time or 1.0)) for _, s in held)
        for held, time in zip(placement.held, computed_s, strict=True)
    ]


def tensor_of(plan: Candidate | WidePlan) -> TensorChoice:
    """The tensor ranks of a plan."""
    return plan.tensor if isinstance(plan, Candidate) else TensorChoice(1)
