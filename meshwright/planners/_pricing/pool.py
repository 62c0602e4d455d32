"""The plans that a search has simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._search.candidate_plans import Candidate, Enumeration, WidePlan
from meshwright.planners._search.tensor_costs import TensorChoice

EQUAL = 1e-12
"""Steps that differ by less than this share are equal."""


@dataclass
class SearchTally:
    """What a search has done: plans with a bound, plans that do not fit, the lowest bound of a plan that was not simulated, and
    whether its time was over before its work was done.
    """

    bounded: int = 0
    died: int = 0
    open_s: float = float("inf")
    ended_early: bool = False


class Pool:
    """Simulated plans that fit, and those that do not; what was enumerated; tensor modes that cannot run the model."""

    def __init__(self) -> None:
        self.listed = Enumeration([], [], 0)
        self.refused: dict[TensorChoice, str] = {}
        self.plans: list[Priced] = []
        self.misfits: list[Priced] = []
        self._best: Priced | None = None
        self._too_large: set[tuple[object, ...]] = set()

    def add(self, priced: Priced) -> None:
        """Keeps a plan."""
        self.plans.append(priced)
        self._keep_best(priced)

    def _keep_best(self, priced: Priced) -> None:
        """Remembers the best plan. Among equals it is one whose devices share no rows: `verify` can compare it with dropout."""
        best = self._best
        faster = best is None or priced.step_s < best.step_s * (1 - EQUAL)
        if faster or (best and priced.step_s <= best.step_s * (1 + EQUAL) and _shares_rows(best) and not _shares_rows(priced)):
            self._best = priced

    def reject(self, priced: Priced) -> None:
        """Keeps a plan that does not fit."""
        self.misfits.append(priced)
        self._too_large.add(_sizes(priced.plan))

    def rejects(self, plan: Candidate) -> bool:
        """Whether the same plan in another layout does not fit: on equal devices it needs as much memory."""
        return _sizes(plan) in self._too_large

    def drop(self, misfits: Sequence[Priced]) -> None:
        """Removes plans that turned out not to fit."""
        gone = {id(each) for each in misfits}
        self.plans = [each for each in self.plans if id(each) not in gone]
        self.misfits += misfits
        self._best = None
        for each in self.plans:
            self._keep_best(each)

    def best(self) -> Priced | None:
        """The plan with the shortest step."""
        return self._best

    def families(self) -> set[str]:
        """The schedules that were simulated."""
        return {each.family.name for each in self.plans}

    def best_stages(self, count: int) -> list[tuple[tuple[PlanStage, ...], float]]:
        """The best different cuts among plans with stages of any width, with their times."""
        found: dict[tuple[PlanStage, ...], float] = {}
        for each in sorted(self.plans, key=lambda priced: priced.step_s):
            if isinstance(each.plan, WidePlan) and each.plan.stages not in found:
                found[each.plan.stages] = each.step_s
            if len(found) == count:
                break
        return list(found.items())


def _shares_rows(priced: Priced) -> bool:
    """Whether devices share the rows of a microbatch."""
    return any(width > 1 for width in priced.widths)


def _sizes(plan: Candidate | WidePlan) -> tuple[object, ...]:
    """What decides the memory of a plan on equal devices."""
    if isinstance(plan, WidePlan):
        return (plan,)
    return plan.family, plan.pp, plan.dp, plan.tensor, plan.rows, plan.share, plan.zero, plan.recompute, plan.ends
