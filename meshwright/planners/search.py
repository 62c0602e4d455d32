"""One search over schedules, pipelines, data-parallel copies, tensor ranks, ZeRO, recompute, rows, and mappings to devices.

1. Enumerate plans of one width (`_search/candidates.py`) and plans with stages of any width (`_search/wide_plans.py`).
2. Bound the step and the memory of each, without building it.
3. Best first by bound: simulate the plan with the lowest bound, until the next bound is no better than the best time. That is the
   proof that no enumerated plan is faster, and the gap if the work limit ends the search before.
4. Simulate with the quick sweep over unlowered lists.
5. The engine proves and simulates the winner. Its memory curve decides whether the plan fits; if not, the next best is tried.

The work limit counts simulated actions, not seconds, so the same input gives the same plan. `seconds` only ends a search early.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from time import perf_counter

from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.profile import Profile
from meshwright.ir.schedule import Sharding
from meshwright.planners._answer.chosen import plan_of
from meshwright.planners._cut_search import CutSearch
from meshwright.planners._limits import PlanLimits
from meshwright.planners._nearest_fit import nothing_fits
from meshwright.planners._pricing.mapping import Mapper
from meshwright.planners._pricing.pool import Pool, SearchTally
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.pricing import Pricer, tensor_of
from meshwright.planners._refused_requests import nothing_runs
from meshwright.planners._search import wide_plans
from meshwright.planners._search.bound_queue import BoundQueue
from meshwright.planners._search.candidate_plans import Candidate, WidePlan
from meshwright.planners._search.candidates import Enumerator
from meshwright.planners._search.effort import (
    ACTIONS,
    ATTEMPTS,
    COMPARED,
    FEW,
    FIRST,
    MOST,
    RAISED,
    REFUSALS,
    RETRIED,
    SHAPES,
    SMALL,
    STARTED,
    SWAPPED,
    TRIALS,
)
from meshwright.planners._search.families import shaped_by_costs
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import NotRunnableError, TensorChoice
from meshwright.planners._wide_search import WideSearch

INF = float("inf")


def plan(
    *, profile: Profile, cluster: Cluster, microbatches: int | None, limits: PlanLimits, batch: int | None = None
) -> Iterator[Plan]:
    """Yields plans, each better than the one before; the last is proved."""
    problem = Problem(profile, cluster, limits, microbatches=microbatches, batch=batch)
    refused: dict[TensorChoice, str] = {}
    while True:
        search = Search(problem, refused)
        try:
            yield from search.run()
        except NotRunnableError as error:
            refused[error.mode] = error.what
        else:
            return


class Search:
    """The state of one search."""

    def __init__(self, problem: Problem, refused: dict[TensorChoice, str] | None = None) -> None:
        self.problem, self.enumerator = problem, Enumerator(problem, refused or {})
        self.pricer = Pricer(problem, self.enumerator.bounds)
        self.pool = Pool()
        self.pool.refused = refused or {}
        self.tally = SearchTally()
        self.end = perf_counter() + problem.limits.seconds
        self.wide = WideSearch(self.pricer, self.pool, self.tally, self.try_plan, self._over)
        self.cuts = CutSearch(self.enumerator.bounds, self.pool, self.simulate, self._over)
        self.tight: dict[Sharding, float] = {}

    def run(self) -> Iterator[Plan]:
        """Enumerates, searches best first, improves, and proves."""
        for simple in self.enumerator.run(few=True).fit:
            asks = self.problem.limits.refusal is not None and simple.tensor.tp > 1  # whether it runs so is asked at the end
            if not asks and (first := self.try_plan(simple)) is not None:
                yield plan_of(self.pricer, self.pool, self.tally, first)
                break
        listed = self.pool.listed = self.enumerator.run()
        self.tally.bounded, self.tally.died = listed.bounded, len(listed.misfit)
        rest = self._best_first(listed.fit)
        self.wide.run()
        rest = self._best_first(rest)
        few = self.problem.devices <= SWAPPED
        if few or self.pool.best() is None:
            self.pool.listed.misfit += self.cuts.squeeze()
        if few:
            self.cuts.improve()
        self._swap_devices()
        self._families(rest)
        yield self._proved(rest)

    def _over(self) -> bool:
        return perf_counter() > self.end

    def try_plan(self, found: Candidate | WidePlan) -> Priced | None:
        """Simulates a plan and keeps it; None if it cannot be built or does not fit."""
        priced = self.simulate(found)
        return None if priced is None or priced.over_bytes > 0 else priced

    def simulate(self, found: Candidate | WidePlan) -> Priced | None:
        """Simulates a plan and keeps it, also if it does not fit; None if it cannot be built or is taken for too large."""
        priced = self.pricer.quick(found)
        self._say()
        if priced is None:
            return None
        best = self.pool.best()
        self.pricer.look_again(priced, INF if best is None else best.step_s)
        too_large = priced.filled >= self.tight.get(priced.sharding, INF)
        if priced.over_bytes > 0 or too_large:
            self.tally.died += 1
            self.pool.reject(priced)
            return None if too_large else priced
        self.pool.add(priced)
        return priced

    def _say(self) -> None:
        """Reports how far the search is."""
        if (progress := self.problem.limits.progress) is not None:
            best = self.pool.best()
            found = f"{self.tally.bounded:,} plans bounded, {self.pricer.simulated:,} simulated"
            progress(min(1.0, self.pricer.actions / ACTIONS), found + (f", best step {best.step_s:.4g} s" if best else ""))

    def _best_first(self, candidates: list[Candidate]) -> list[Candidate]:
        """Simulates by bound until the next one cannot be better. Returns what was not simulated.

        On many devices the links of a plan raise its bound first. On few, slower plans matter too: mapped to other devices they
        may be the best.
        """
        queue, raises = BoundQueue(candidates), self.problem.devices > SWAPPED
        most, died, tried, raised = FIRST if self.problem.devices > FEW else MOST, self.tally.died, 0, 0
        while (candidate := queue.lowest()) is not None:
            best = self.pool.best()
            many = max(tried, raised) >= MOST or tried - (self.tally.died - died) >= most
            spent = many or self.pricer.actions > ACTIONS or self._over()
            if best is not None and (candidate.bound_s >= best.step_s * (1 - 1e-9) or spent):
                break
            queue.pop()
            if self.problem.uniform and self.pool.rejects(candidate):
                tried, self.tally.died = tried + 1, self.tally.died + 1
            elif raises and best is not None and not candidate.sharp:
                raised += 1
                queue.put_back(self.pricer.raised(candidate))
            else:
                tried += 1
                self.try_plan(candidate)
        return queue.rest()

    def _families(self, candidates: list[Candidate]) -> None:
        """Simulates the most promising plans of each schedule, so that it can be compared, although they are not the best ones.

        The bounds of some of them are raised first by their links. A plan is simulated if it may be the best of its schedule.
        """
        steps = {each.family.name: each.step_s for each in sorted(self.pool.plans, key=lambda each: -each.step_s)}
        few = self.problem.devices <= SWAPPED  # on more devices the most promising ones have raised bounds already
        most, attempts = (RAISED, ATTEMPTS) if few else (1, ATTEMPTS - 1)
        found: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            of_schedule = found.setdefault(candidate.family.name, [])
            size = 2 * candidate.pp * candidate.microbatches * candidate.family.chunks
            if size <= COMPARED and (candidate.sharp or len(of_schedule) < most) and not self._over():
                of_schedule.append(candidate if candidate.sharp else self.pricer.raised(candidate))
        for name, of_schedule in found.items():
            tried = 0
            for candidate in sorted(of_schedule, key=lambda each: each.key):
                known = name in steps and shaped_by_costs(candidate.family)  # to make an order takes long
                wanted = candidate.bound_s < steps.get(name, INF) and not known
                if wanted and tried < attempts and not self._over():
                    tried += 1
                    if (priced := self.try_plan(candidate)) is not None:
                        steps[name] = min(steps.get(name, INF), priced.step_s)

    def _swap_devices(self) -> None:
        """Maps the best plans of different shapes to other devices."""
        if self.problem.devices <= SWAPPED:
            trials = TRIALS if self.problem.devices <= FEW else TRIALS // SHAPES
            started = STARTED if self.problem.devices <= FEW else SHAPES
            mapper = Mapper(self.problem, self.enumerator.bounds, self.pricer)
            for priced in mapper.mapped(list(self.pool.plans), started, SHAPES, trials, self._over):
                self.pool.add(priced)
            for microbatches, rows in wide_plans.steps_of(self.problem):
                self.wide.polish(microbatches, rows)

    def _proved(self, rest: list[Candidate]) -> Plan:
        """Returns the best plan that the engine proves. If its memory curve exceeds a device, the search goes on without it.

        On few devices plans that it excluded are tried. After several large plans, those of the same kind that fill their
        devices as much by the quick estimate go, too.
        """
        for refused in count(1):
            rest = self._best_first(rest)
            best = self.pool.best()
            if best is None:
                self.pool.listed.misfit += self.cuts.squeeze()
                best = self.pool.best()
            if best is None:
                break
            filled = best.filled
            timeline, uses = self.pricer.engine(best)
            if best.over_bytes <= 0:
                self._refuse_mode(best)
                self.tally.ended_early = self._over()
                self.tally.open_s = min(rest[0].bound_s if rest else INF, self.wide.open_s)
                self.pricer.keep_order(best)
                return plan_of(self.pricer, self.pool, self.tally, best, timeline, uses)
            tight = filled if refused >= REFUSALS and best.actions > SMALL else INF
            self.tight[best.sharding] = min(tight, self.tight.get(best.sharding, INF))
            alike = [each for each in self.pool.plans if each.sharding is best.sharding and each is not best]
            dropped = [best, *(each for each in alike if each.filled >= tight)]
            self.tally.died += len(dropped)
            self.pool.drop(dropped)
            if self.problem.devices <= FEW and (refused <= RETRIED or self.pool.best() is None) and not self._over():
                self.wide.run()
        if not (self.pool.listed.misfit or self.pool.misfits):
            raise nothing_runs(self.problem)
        raise nothing_fits(self.pricer, self.pool)

    def _refuse_mode(self, best: Priced) -> None:
        """Raises if the model cannot run under the tensor mode of a plan."""
        refusal, mode = self.problem.limits.refusal, tensor_of(best.plan)
        why = refusal(best.parallel, best.plan.rows) if refusal is not None and mode.tp > 1 else None
        if why is not None:
            raise NotRunnableError(mode, why)
