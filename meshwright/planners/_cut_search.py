"""Other cuts of plans of one width. They are enumerated with cuts that are even by work, which miss two things.

* Where a cut is cheap: layers of a transformer send equally much, those of other models do not. And a worker that holds several
  stages may be as busy with uneven ones.
* Memory: even work is not even memory.

Both move one end of a stage at a time, by one layer or by more, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.planners._pricing.mapping import shape_of
from meshwright.planners._pricing.pool import Pool
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.candidates import Enumerator
from meshwright.planners._search.effort import CUTS, RECUT, SQUEEZED

Ends = tuple[int, ...]


class CutSearch:
    """The part of a search that moves cuts. `try_plan` simulates a plan and keeps it in the pool if it fits."""

    def __init__(
        self, enumerator: Enumerator, pool: Pool, try_plan: Callable[[Candidate], Priced | None], over: Callable[[], bool]
    ) -> None:
        self.enumerator, self.pool, self.try_plan, self._over = enumerator, pool, try_plan, over
        self.layers = enumerator.problem.layers
        self._tried: set[tuple[object, ...]] = set()
        self.bounded = 0
        """How many plans with other cuts were looked at."""

    def improve(self) -> None:
        """Moves the cuts of the best plans of different shapes to where the step is shorter."""
        best: dict[tuple[object, ...], Priced] = {}
        for priced in sorted(self.pool.plans, key=lambda each: each.step_s):
            if isinstance(priced.plan, Candidate) and len(priced.plan.ends) > 1:
                best.setdefault(_all_but_cuts(priced.plan), priced)
        for priced in list(best.values())[:RECUT]:
            self._climb(priced)

    def _climb(self, priced: Priced) -> None:
        """Goes to the first neighbour that is faster, the lowest bound first, until there is none or the work is done."""
        left = CUTS
        while True:
            plan, found = priced.plan, None
            assert isinstance(plan, Candidate)
            for other in sorted(self._neighbours(plan), key=lambda each: each.bound_s):
                if other.bound_s >= priced.step_s * (1 - 1e-9) or not left or self._over():
                    break
                key = (shape_of(other), other.ranks, other.layout, other.reverse)
                if other.over_bytes > 0 or key in self._tried:
                    continue
                self._tried.add(key)
                left -= 1
                tried = self.try_plan(other)
                if tried is not None and tried.step_s < priced.step_s * (1 - 1e-9):
                    found = tried
                    break
            if found is None:
                return
            priced = found

    def squeeze(self, misfits: list[Candidate]) -> list[Candidate]:
        """Returns the plans that miss the memory the least with cuts that need the least memory: some of them may fit."""
        found: list[Candidate] = []
        starts: dict[tuple[object, ...], Candidate] = {}
        for plan in sorted((each for each in misfits if len(each.ends) > 1), key=lambda each: (each.over_bytes, each.key)):
            starts.setdefault(_all_but_cuts(plan), plan)
        for plan in list(starts.values())[:SQUEEZED]:
            while not self._over():
                least = min(self._neighbours(plan), key=lambda each: each.over_bytes, default=plan)
                if least.over_bytes >= plan.over_bytes:
                    break
                plan = least
                if plan.over_bytes <= 0:
                    break
            found.append(plan)
        return sorted(found, key=lambda each: (each.over_bytes, each.key))

    def _neighbours(self, plan: Candidate) -> Iterator[Candidate]:
        """Yields plans in which one stage ends elsewhere."""
        marks = (0, *plan.ends)
        for place in range(1, len(marks) - 1):
            for end in _ends_near(marks[place - 1], marks[place], marks[place + 1]):
                self.bounded += 1
                yield self.enumerator.recut(plan, (*plan.ends[: place - 1], end, *plan.ends[place:]))


def _ends_near(before: int, at: int, after: int) -> list[int]:
    """Where the end of a stage can go between its neighbours: by 1, 2, 4, ... layers."""
    steps = [2**k for k in range((after - before).bit_length())]
    moved = {at + step for step in steps} | {at - step for step in steps}
    return sorted(end for end in moved if before < end < after)


def _all_but_cuts(plan: Candidate) -> tuple[object, ...]:
    """What defines a plan except its cuts and its devices."""
    return plan.family, plan.pp, plan.dp, plan.tensor, plan.rows, plan.share, plan.zero, plan.recompute
