"""Other cuts of plans of one width. They are enumerated with cuts that are even by work, which miss two things.

* Where a cut is cheap: layers of a transformer send equally much, those of other models do not. And a worker that holds several
  stages may be as busy with uneven ones.
* Memory: even work is not even memory.

Both move one end of a stage at a time, by one layer or by more, as long as that helps: first by bounds until a plan may fit, then
by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from meshwright.planners._pricing.mapping import shape_of
from meshwright.planners._pricing.pool import Pool
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.effort import CUTS, LOOKS, RECUT, RUN, SQUEEZED, STAGES
from meshwright.planners._search.plan_bounds import PlanBounds

LESS = 1 - 1e-9
INF = float("inf")


class CutSearch:
    """The part of a search that moves cuts. `simulate` simulates a plan and keeps it in the pool if it fits."""

    def __init__(
        self, bounds: PlanBounds, pool: Pool, simulate: Callable[[Candidate], Priced | None], over: Callable[[], bool]
    ) -> None:
        self.bounds, self.pool, self.simulate, self._over = bounds, pool, simulate, over
        self._tried: set[tuple[object, ...]] = set()
        self._looks = 0

    def improve(self) -> None:
        """Moves the cuts of the best plans of different shapes to where the step is shorter."""
        self._looks = 0
        by_step = sorted(self.pool.plans, key=lambda each: each.step_s)
        priced = {each.plan: each for each in by_step if isinstance(each.plan, Candidate)}
        for plan in _one_each(priced)[:RECUT]:
            self._climb(priced[plan])

    def squeeze(self) -> list[Candidate]:
        """Looks for cuts with which plans fit that do not fit otherwise; those that may be the best, if a plan fits already.

        Returns plans that still do not fit, but miss the memory by less.
        """
        self._looks = 0
        limit, missed = self._best_s(), []
        misfits = [each for each in self.pool.listed.misfit if each.bound_s < limit]
        misfits += [each.plan for each in self.pool.misfits if isinstance(each.plan, Candidate) and each.step_s < limit]
        misfits = sorted(filter(self.bounds.may_fit, misfits), key=_excess if limit == INF else _promise)
        left = SQUEEZED
        for plan in _one_each(misfits):
            if not left or self._looks >= LOOKS or self._over():
                break
            settled = self._settled(plan)
            if settled.over_bytes > 0:
                missed.append(settled)
            elif settled.bound_s < self._best_s():
                left -= 1
                if (priced := self.simulate(settled)) is not None:
                    self._climb(priced)
        return sorted(missed, key=_excess)

    def _best_s(self) -> float:
        best = self.pool.best()
        return INF if best is None else best.step_s * LESS

    def _settled(self, plan: Candidate) -> Candidate:
        """Goes to the neighbour with the least excess of memory, then the lowest bound, until no neighbour is better."""
        while self._looks < LOOKS and not self._over():
            found = min(self._neighbours(plan), key=_excess, default=plan)
            if _excess(found) >= _excess(plan):
                break
            plan = found
        return plan

    def _climb(self, priced: Priced) -> None:
        """Goes to the first neighbour that needs less excess memory or is faster, the lowest bound first, until there is none."""
        left = CUTS
        while left and self._looks < LOOKS:
            plan, found = priced.plan, None
            assert isinstance(plan, Candidate)
            for other in sorted(self._neighbours(plan), key=lambda each: each.bound_s):
                if not left or self._over() or other.bound_s >= self._limit(priced):
                    break
                key = (shape_of(other), other.ranks, other.layout, other.reverse)
                if other.over_bytes > 0 or key in self._tried:
                    continue
                self._tried.add(key)
                left -= 1
                tried = self.simulate(other)
                if tried is not None and (tried.over_bytes, tried.step_s) < (priced.over_bytes * LESS, priced.step_s * LESS):
                    found = tried
                    break
            if found is None:
                return
            priced = found

    def _limit(self, priced: Priced) -> float:
        """A neighbour has to be faster than the plan if that fits, or than the best one."""
        return self._best_s() if priced.over_bytes > 0 else priced.step_s * LESS

    def _neighbours(self, plan: Candidate) -> Iterator[Candidate]:
        """Yields plans in which one stage ends elsewhere, or some stages in a row one layer earlier or later."""
        for ends in _ends_near(plan.ends):
            self._looks += 1
            yield self.bounds.recut(plan, ends)


def _ends_near(ends: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields cuts with one end moved by 1, 2, 4, ... layers, or a run of ends moved by one layer."""
    marks, last = (0, *ends), len(ends) - 1
    for place in range(last):
        before, at, after = marks[place : place + 3]
        moves = [2**k for k in range((after - before).bit_length())]
        for end in sorted({at + move for move in moves} | {at - move for move in moves}):
            if before < end < after:
                yield (*ends[:place], end, *ends[place + 1 :])
    for first in range(last):
        for end in range(first + 2, min(first + RUN, last) + 1):
            for move in (-1, 1):
                moved = (*ends[:first], *(each + move for each in ends[first:end]), *ends[end:])
                if moved[first] > marks[first] and moved[end - 1] < moved[end]:
                    yield moved


def _one_each(plans: Iterable[Candidate]) -> list[Candidate]:
    """The first plan of each shape with several stages, but not with very many."""
    found: dict[tuple[object, ...], Candidate] = {}
    for plan in plans:
        if 1 < len(plan.ends) <= STAGES:
            found.setdefault(_all_but_cuts(plan), plan)
    return list(found.values())


def _all_but_cuts(plan: Candidate) -> tuple[object, ...]:
    """What defines a plan except its cuts, its layout, and a mapping to other devices."""
    degrees = plan.pp, plan.dp, plan.tensor, plan.rows, plan.share
    return plan.family, degrees, plan.zero, plan.recompute, plan.reverse


def _promise(plan: Candidate) -> tuple[object, ...]:
    """The fastest plan first."""
    return plan.bound_s, plan.key


def _excess(plan: Candidate) -> tuple[object, ...]:
    """The plan that misses the memory the least first, then the fastest one."""
    return max(plan.over_bytes, 0.0), plan.bound_s, plan.ends
