"""Why other plans lost: the best plan of each schedule against the chosen one, and the nearest rival of each choice."""

from __future__ import annotations

from typing import Any

from meshwright.ir.plan.chosen_plan import Rejected
from meshwright.planners._answer.plan_row import choices, gb, name, row
from meshwright.planners._pricing.pool import Pool
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._search.candidate_plans import Candidate, WidePlan
from meshwright.planners._search.families import families
from meshwright.planners._search.problem import Problem

CHOICES = ("schedule", "pp", "dp", "tp", "zero", "rows", "microbatches", "recompute", "layout", "width")


def best_of_schedules(problem: Problem, pool: Pool, best: Priced) -> tuple[Rejected, ...]:
    """The best plan of each schedule, with why it lost: slower, too large, not simulated, or not runnable at these sizes."""
    done = {best.family.name}
    found: list[Rejected] = []

    def add(plan: Candidate | WidePlan, reason: str, priced: Priced | None = None) -> None:
        done.add(plan.family.name)
        step_s = priced.step_s if priced is not None else float("inf")
        found.append(Rejected(name(plan), step_s, reason, {} if priced is None else row(problem, priced)))

    for each in sorted(pool.plans, key=lambda priced: priced.step_s):
        if each.family.name not in done:
            add(each.plan, why_slower(each, best), each)
    for open_ in pool.listed.fit:
        if open_.family.name not in done:
            add(open_, f"not simulated: takes at least {open_.bound_s:.4g} s")
    for each in sorted(pool.misfits, key=lambda priced: (priced.over_bytes, priced.step_s)):
        if each.family.name not in done:
            add(each.plan, f"memory: {gb(each.over_bytes)} too much on the tightest worker", each)
    for candidate in sorted(pool.listed.misfit, key=lambda candidate: (candidate.over_bytes, candidate.key)):
        if candidate.family.name not in done:
            add(candidate, f"memory: at least {gb(candidate.over_bytes)} too much on the tightest worker")
    found += [Rejected(f"tp {mode.tp} {mode.name}", float("inf"), f"not runnable: {why}") for mode, why in pool.refused.items()]
    for family in families(problem.limits.schedule):
        if family.name not in done:
            found.append(Rejected(family.name, float("inf"), "not runnable with these numbers of workers and microbatches"))
    return tuple(found)


def why_slower(other: Priced, best: Priced) -> str:
    """Why a plan is slower: the share of its step in which workers wait, or more work."""
    if other.step_s <= best.step_s * (1 + 1e-9):
        return "as fast; the simpler or first found plan is kept"

    def busy(priced: Priced) -> float:
        each = [cost.forward_s + cost.backward_s + cost.recompute_s for cost in priced.costs]
        return priced.microbatches * sum(each) / priced.workers

    waits = (other.step_s - busy(other)) - (best.step_s - busy(best))
    work = busy(other) - busy(best)
    reason = f"{waits:.3g} s more waiting" if waits >= work else f"{work:.3g} s more work"
    more = f" by {other.step_s / best.step_s - 1:.2%}" if best.step_s else ""
    return f"slower{more}: {reason}"


def rivals(pool: Pool, best: Priced) -> tuple[Rejected, ...]:
    """For each choice of the plan, the best simulated plan that chooses otherwise."""
    mine = choices(best)
    found: list[Rejected] = []
    for choice in CHOICES:
        others = [each for each in pool.plans if choices(each)[choice] != mine[choice]]
        if not others:
            continue
        rival = min(others, key=lambda priced: priced.step_s)
        size = max(rival.peak_bytes, default=0.0) - max(best.peak_bytes, default=0.0)
        seconds, theirs = rival.step_s - best.step_s, choices(rival)[choice]
        seconds = 0.0 if abs(seconds) <= 1e-9 * best.step_s else seconds
        reason = f"{choice} {_shown(mine[choice])} instead of {_shown(theirs)}: {seconds:+.4g} s, {size / 1e9:+.3g} GB"
        found.append(Rejected(name(rival.plan), rival.step_s, reason, {"choice": choice, "seconds": seconds, "bytes": size}))
    return tuple(found)


def _shown(value: Any) -> str:
    """A choice in words: stages of one width have no list of widths."""
    match value:
        case None:
            return "equal"
        case bool():
            return "yes" if value else "no"
        case list():
            return "+".join(map(str, value))
        case _:
            return str(value)
