"""The plan without a search: as many stages as devices (or as `pp` asks for), cut evenly, under 1F1B; the rest are copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.profile import Profile
from meshwright.planners._answer.chosen import plan_of
from meshwright.planners._limits import PlanLimits
from meshwright.planners._nearest_fit import nothing_fits
from meshwright.planners._pricing.pool import Pool, SearchTally
from meshwright.planners._pricing.pricing import Pricer
from meshwright.planners._refused_requests import nothing_runs
from meshwright.planners._search.candidates import Enumerator
from meshwright.planners._search.problem import Problem


def plan(
    *, profile: Profile, cluster: Cluster, microbatches: int | None, limits: PlanLimits, batch: int | None = None
) -> Iterator[Plan]:
    """Yields one plan: the longest pipeline that the devices and layers allow."""
    fixed = replace(limits, schedule=limits.schedule or "onef1b", tensor=False)
    problem = Problem(profile, cluster, fixed, microbatches=microbatches, batch=batch)
    enumerator = Enumerator(problem)
    pricer, pool = Pricer(problem, enumerator.bounds), Pool()
    listed = pool.listed = enumerator.run()
    plain = [each for each in listed.fit if each.zero == "replicated" and not each.recompute]
    if not listed.fit and not listed.misfit:
        raise nothing_runs(problem)
    for candidate in sorted(plain or listed.fit, key=lambda each: (-each.pp, -each.dp, each.key)):
        priced = pricer.quick(candidate)
        if priced is not None and priced.over_bytes <= 0:
            timeline, uses = pricer.engine(priced, bounded=True)
            if priced.over_bytes <= 0:
                pool.add(priced)
                found = plan_of(pricer, pool, SearchTally(listed.bounded, len(listed.misfit)), priced, timeline, uses)
                yield replace(found, planner="even", lower_bound_s=timeline.lower_bound_s + priced.update_s)
                return
        if priced is not None:
            pool.misfits.append(priced)
    raise nothing_fits(pricer, pool)
