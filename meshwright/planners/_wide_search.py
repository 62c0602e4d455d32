"""Tries plans with stages of any width: from several starts to better neighbours, and orders that are made for their costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from meshwright.planners._pricing.pool import Pool, SearchTally
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.pricing import Pricer
from meshwright.planners._search import wide_plans
from meshwright.planners._search.candidate_plans import WidePlan
from meshwright.planners._search.effort import ACTIONS, FEW, ORDERED, POLISHED, ROUNDS, SMALL, SWAPPED, TRIALS, WIDE
from meshwright.planners._search.wide_plans import EVERY, INF, Stages
from meshwright.planners.spp import small_enough, stage_candidates


class WideSearch:
    """The part of a search that has stages of any width. `try_plan` simulates a plan and keeps it in the pool."""

    def __init__(
        self,
        pricer: Pricer,
        pool: Pool,
        tally: SearchTally,
        try_plan: Callable[[WidePlan], Priced | None],
        over: Callable[[], bool],
    ) -> None:
        self.problem, self.pricer, self.pool, self.tally = pricer.problem, pricer, pool, tally
        self.try_plan, self._over = try_plan, over
        self.tried: set[tuple[Stages, int]] = set()
        self.open_s = INF
        """The least bound of the plans that were not simulated."""
        self._bounds: dict[tuple[Stages, int], float] = {}

    @property
    def tries_all(self) -> bool:
        """Whether every plan is tried."""
        if self.problem.devices > FEW:
            return False
        plans = wide_plans.count_of_all(self.problem.layers, self.problem.kinds)
        return plans * len(wide_plans.steps_of(self.problem)) <= EVERY

    def run(self) -> None:
        """Tries plans; those that were tried before are not tried again."""
        problem, limits = self.problem, self.problem.limits
        self.open_s = INF
        if limits.dp not in (None, 1) or problem.devices > WIDE:
            return
        for microbatches, rows in wide_plans.steps_of(problem):
            if self._over():
                self.open_s = min(self.open_s, wide_plans.least_s(problem, microbatches, rows))
                continue
            starts: list[tuple[str, Stages]] = []
            if self.tries_all:
                starts = [("every plan", stages) for stages in wide_plans.every_plan(problem.layers, problem.kinds)]
            else:
                starts += [("by speed", stages) for stages in wide_plans.unequal_starts(problem, rows)]
                for order in wide_plans.orders(problem):
                    starts += [("threshold", stages) for stages in wide_plans.table_plans(problem, order, microbatches, rows)]
                if small_enough(problem.layers, problem.devices):
                    starts += [("spp", stages) for stages in stage_candidates(problem, microbatches, rows)]
            self.tally.bounded += len(starts)
            starts = [start for start in starts if not self._too_slow(start[1], microbatches, rows)]
            bounds = (self._bound_s(stages, microbatches, rows) for _, stages in starts)
            ranked = sorted(zip(bounds, count(), starts, strict=False), key=lambda item: item[:2])
            for place, (bound, _, (source, stages)) in enumerate(ranked):
                compared = place == 0 and problem.devices > SWAPPED and 2 * len(stages) * microbatches <= SMALL
                self._try_stages(stages, bound, microbatches, rows, source, compared=compared)
            self._improve(microbatches, rows, [stages for _, _, (_, stages) in ranked])
            self.polish(microbatches, rows)

    def _bound_s(self, stages: Stages, microbatches: int, rows: int | None) -> float:
        key = (stages, microbatches)
        if key not in self._bounds:
            self._bounds[key] = wide_plans.bound_s(self.problem, stages, microbatches, rows)
        return self._bounds[key]

    def _too_slow(self, stages: Stages, microbatches: int, rows: int | None) -> bool:
        """Whether the work of a stage alone takes longer than the best step: a quick test before the bound."""
        best, problem = self.pool.best(), self.problem
        if best is None or problem.devices > FEW:
            return False
        for stage in stages:
            sums = problem.work_sums(rows, stage.width)
            slow = max(problem.slowness_of[device] for device in stage.devices)
            if slow * microbatches * (sums[stage.last + 1] - sums[stage.first]) > best.step_s * (1 + 1e-9):
                self.open_s = min(self.open_s, best.step_s)
                return True
        return False

    def _try_stages(
        self, stages: Stages, bound: float, microbatches: int, rows: int | None, source: str, *, compared: bool
    ) -> float:
        """Simulates stages under each schedule; returns the best time, infinite if the bound excludes them.

        Stages that are only `compared` are simulated although their bound excludes them.
        """
        best = self.pool.best()
        spent = self.pricer.actions > ACTIONS and source != "spp"
        excluded = best is not None and bound >= best.step_s * (1 - 1e-9) and not compared
        if (stages, microbatches) in self.tried:
            return INF
        if spent or excluded or self._over():
            self.open_s = min(self.open_s, bound)
            return INF
        self.tried.add((stages, microbatches))
        below_s = INF if best is None or compared else best.step_s
        return self._try_schedules(stages, microbatches, rows, source, below_s)

    def _improve(self, microbatches: int, rows: int | None, plans: list[Stages]) -> None:
        """Walks from the best plans with stages of any width to better neighbours; on few devices for each number of stages."""
        problem = self.problem
        if problem.devices > SWAPPED:
            return
        most = TRIALS if problem.devices > FEW else max(TRIALS, 8 * TRIALS // len(wide_plans.steps_of(problem)))
        last = self.pricer.simulated + most
        tried: set[Stages] = set()
        starts = [(wide_plans.with_recompute(stages, [0.0] * len(stages)), step) for stages, step in self.pool.best_stages(6)]
        if problem.devices <= FEW and not self.tries_all:
            for lowest in {len(each): each for each in reversed(plans)}.values():
                found = wide_plans.descended(problem, lowest, microbatches, rows)
                starts.append((found, self._try_neighbour(found, microbatches, rows)))
        for stages, step in starts:
            for _ in range(ROUNDS):
                ways = [each for each in wide_plans.neighbours(stages, problem.kinds, problem.layers) if each not in tried]
                tried.update(ways)
                ways = [each for each in ways if wide_plans.allowed(problem, each, rows)]
                self.tally.bounded += len(ways)
                ranked = sorted((self._bound_s(each, microbatches, rows), n) for n, each in enumerate(ways))
                better = None
                for bound, n in ranked:
                    if bound >= step * (1 - 1e-9) or self._over() or self.pricer.simulated > last:
                        break
                    time = self._try_neighbour(ways[n], microbatches, rows, step)
                    if time < step * (1 - 1e-9):
                        better, step = ways[n], time
                        break
                if better is None:
                    break
                stages = better

    def polish(self, microbatches: int, rows: int | None) -> None:
        """Tries orders that are made for the costs of the best stages; only where that takes little time."""
        if self.problem.devices > ORDERED:
            return
        for stages, _ in self.pool.best_stages(80):
            best, bound = self.pool.best(), self._bound_s(stages, microbatches, rows)
            close = best is not None and bound < best.step_s * (1 - 1e-9)
            wanted = self.problem.limits.schedule in (None, "listed")
            if not close or not wanted or len(stages) * microbatches > POLISHED or len(stages) == 1:
                continue
            if self._over():
                self.open_s = min(self.open_s, bound)
                continue
            for each in wide_plans.polished(stages, microbatches, rows):
                self.try_plan(each)

    def _try_neighbour(self, stages: Stages, microbatches: int, rows: int | None, below_s: float = INF) -> float:
        if self.pricer.actions > 2 * ACTIONS:
            return INF
        return self._try_schedules(stages, microbatches, rows, "improved", below_s)

    def _try_schedules(self, stages: Stages, microbatches: int, rows: int | None, source: str, below_s: float) -> float:
        """Simulates stages under each schedule that may be faster than `below_s`; returns the best time, or infinity.

        Stages that do not fit are tried again with recompute, and so are all if that is part of the only schedule.
        """
        plans = wide_plans.as_plans(self.problem, stages, microbatches, rows, source, below_s)
        found = {each.family: self.try_plan(each) for each in plans}
        misses = None in found.values() and self.problem.is_limited
        if misses or all(family.early for family in wide_plans.line_families(self.problem)):
            for each in wide_plans.as_plans(self.problem, stages, microbatches, rows, source, below_s, recompute=True):
                if each.family.early or found.get(each.family, 0) is None:
                    found[each.family] = self.try_plan(each)
        return min((priced.step_s for priced in found.values() if priced is not None), default=INF)
