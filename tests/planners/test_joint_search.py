"""The search against every combination of its choices, all simulated: degrees, tensor mode, rows, ZeRO, recompute, schedule.

The search leaves out what it takes for worse, by bounds and by rules. Here nothing is left out. Costs of layers are random, and
memory is short, so that some problems need recompute and some need tensor ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, Host, LayerCost, Link, Profile
from meshwright.planners import NothingFitsError
from meshwright.planners._limits import PlanLimits
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.cuts.even_cuts import even_cuts
from meshwright.planners._search.families import ZERO_3, families
from meshwright.planners._search.group_bounds import placement_of
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import tensor_choices
from meshwright.planners.search import Search

DEVICES, BATCH, LAYERS = 4, 8, 6


def problem_of(seed: int) -> tuple[Profile, Cluster]:
    """Layers like those of a transformer, on four devices of which none can hold all of them."""
    choose = random.Random(seed)
    scale = choose.choice((0.3, 1.0, 3.0))

    def layer(n: int) -> LayerCost:
        time = choose.uniform(0.5, 1.5) * 1e-3
        times = (time, choose.uniform(1.6, 2.0) * time)
        return LayerCost(
            f"layer {n}", times, times, times, output_bytes=1e6, saved_bytes=choose.uniform(1, 6) * 1e6,
            parameter_bytes=scale * choose.uniform(2, 8) * 1e6, transient_bytes=2e5, flops=1e10,
        )  # fmt: skip

    profile = Profile(tuple(map(layer, range(LAYERS))), rows=(1, 2), tokens_per_row=64)
    state = sum(each.parameter_bytes for each in profile.layers) * (2 + profile.optimizer_bytes_per_parameter / 4)
    device = Device("gpu", choose.uniform(0.25, 0.7) * state + 1e7, {"fp32": 1e13}, bytes_per_s=1e12)
    inside = Link(1e-6, choose.choice((5e9, 5e10, 3e11)))
    each = choose.choice((2, 4))
    return profile, Cluster(devices=(device,) * DEVICES, hosts=(Host(each, inside, Link(1e-5, 5e9)),) * (DEVICES // each))


def every_candidate(search: Search) -> Iterator[Candidate]:
    """All combinations of one width, cut evenly, whatever they promise."""
    problem = search.problem
    for tp in (1, 2, 4):
        for pp in range(1, DEVICES // tp + 1):
            for dp in range(1, DEVICES // tp // pp + 1):
                for rows, share, count in problem.splits(dp):
                    for tensor in tensor_choices(problem.profile, tp):
                        if not (rows or 0) % tensor.row_unit:
                            plain = Candidate(families()[0], pp, dp, tensor, rows, share, count, "", False, "", (), 0.0)
                            yield from _variants(search, plain)


def _variants(search: Search, plain: Candidate) -> Iterator[Candidate]:
    """Schedules, ZeRO, recompute and layouts of the same degrees."""
    pp, dp = plain.pp, plain.dp
    for family in (*families(), *([ZERO_3] if pp == 1 and dp > 1 and plain.tensor.tp == 1 else [])):
        stages = placement_of(family, pp).stages if family.fits(pp, plain.microbatches) or family is ZERO_3 else LAYERS + 1
        if stages > LAYERS:
            continue
        modes = ("replicated", "zero-1", "zero-2") if dp * family.replicas > 1 else ("replicated",)
        for recompute in (True,) if family.early else (False, True):
            sums = search.pricer.bounds.timed(plain.rows, plain.share, plain.tensor).sums["again" if recompute else "work"]
            ends = even_cuts(sums, [1.0] * stages)
            for zero in ("zero-3",) if family is ZERO_3 else modes:
                for layout in ("stages", "copies") if pp > 1 and dp > 1 else ("stages",):
                    yield replace(plain, family=family, zero=zero, recompute=recompute, layout=layout, ends=ends)


def exhaustive(profile: Profile, cluster: Cluster) -> tuple[float, int]:
    """The shortest step of all that the engine finds small enough, and how many plans were simulated."""
    search = Search(Problem(profile, cluster, PlanLimits(), microbatches=None, batch=BATCH))
    found = [priced for each in every_candidate(search) if (priced := search.pricer.quick(each)) is not None]
    for priced in sorted(found, key=lambda each: each.step_s):
        search.pricer.engine(priced)
        if priced.over_bytes <= 0:
            return priced.step_s, len(found)
    return float("inf"), len(found)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 44), marks=pytest.mark.slow)], ids=["one", "all"])
def test_the_search_finds_the_best_of_all_combinations(seeds: range) -> None:
    chosen: dict[str, int] = {"recompute": 0, "tensor": 0, "nothing fits": 0}
    for seed in seeds:
        profile, cluster = problem_of(seed)
        best, simulated = exhaustive(profile, cluster)
        assert simulated > 500
        try:
            plan = mw.plan(profile, cluster, batch=BATCH, planner="search")
        except NothingFitsError:
            assert best == float("inf"), seed
            chosen["nothing fits"] += 1
            continue
        assert plan.step_s <= best * (1 + 1e-9), (seed, plan.name)
        chosen["recompute"] += bool(plan.row["recompute"])
        chosen["tensor"] += plan.row["tp"] > 1
    assert len(seeds) < 40 or (min(chosen["recompute"], chosen["tensor"]) >= 2 and chosen["nothing fits"] < 4), chosen
