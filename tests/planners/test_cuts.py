"""Cuts that the search finds, against every cut: with layers that differ, and memory that even cuts miss."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright import Cluster, Device, Host, LayerCost, Link, Profile
from meshwright.planners import NothingFitsError
from meshwright.planners._limits import PlanLimits
from meshwright.planners._search.cuts.capped_cuts import Room, capped_cuts
from meshwright.planners._search.cuts.even_cuts import even_cuts
from meshwright.planners._search.problem import Problem
from meshwright.planners.search import Search
from tests.planners.test_joint_search import BATCH, LAYERS, every_candidate

INF = float("inf")


@settings(deadline=None)
@given(st.data())
def test_cuts_are_the_best_that_fit(data: st.DataObject) -> None:
    """The busiest stage has the least work of all cuts, or of those within the memory; without a result, no cut fits."""
    stages = data.draw(st.integers(1, 4), "stages")
    layers = data.draw(st.integers(stages, 7), "layers")

    def numbers(count: int, least: int, most: int) -> list[int]:
        return data.draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    work, parameters, saved = numbers(layers, 1, 9), numbers(layers, 0, 9), numbers(layers, 0, 9)
    slowness, alive, room = numbers(stages, 1, 3), numbers(stages, 1, 4), numbers(stages, 1, 80)

    def sums(values: list[int]) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])

    def busiest(ends: tuple[int, ...]) -> float:
        runs = list(enumerate(pairwise((0, *ends))))
        fits = all(3 * sum(parameters[a:b]) + alive[k] * sum(saved[a:b]) <= room[k] for k, (a, b) in runs)
        return max(slowness[k] * sum(work[a:b]) for k, (a, b) in runs) if fits else INF

    every = [(*inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    best = min(map(busiest, every))
    memory = Room(sums(parameters), sums(saved), 3.0, np.array(alive, float), np.array(room, float))
    found = capped_cuts(sums(work), np.array(slowness, float), memory)
    assert (INF if found is None else busiest(found)) == (best if best == INF else pytest.approx(best, rel=1e-5))
    room = [1000] * stages
    assert busiest(even_cuts(sums(work), [float(slow) for slow in slowness])) == pytest.approx(min(map(busiest, every)), rel=1e-5)


def problem_of(seed: int) -> tuple[Profile, Cluster]:
    """Layers of which the first may hold most parameters, on four devices that may differ in speed and memory."""
    choose = random.Random(seed)
    scale = choose.choice((0.3, 1.0, 3.0))
    differ = choose.random() < 0.5

    def layer(n: int) -> LayerCost:
        time = choose.uniform(0.2, 2) * 1e-3
        times = (time, choose.uniform(1.6, 2.0) * time)
        size = scale * choose.uniform(1, 10) * 1e6 * (4 if n == 0 and choose.random() < 0.5 else 1)
        return LayerCost(
            f"layer {n}", times, times, times, output_bytes=choose.choice((1e5, 1e6, 8e6)),
            saved_bytes=choose.uniform(1, 6) * 1e6, parameter_bytes=size, transient_bytes=2e5, flops=1e10,
        )  # fmt: skip

    profile = Profile(tuple(map(layer, range(LAYERS))), rows=(1, 2), tokens_per_row=64)
    state = sum(each.parameter_bytes for each in profile.layers) * (2 + profile.optimizer_bytes_per_parameter / 4)
    tight, devices = choose.uniform(0.27, 0.6), []
    for _ in range(4):
        share, speed = (choose.uniform(0.6, 1.4), choose.choice((1.0, 2.0))) if differ else (1.0, 1.0)
        devices.append(Device(f"gpu{speed}", share * tight * state + 1e7, {"fp32": speed * 1e13}, bytes_per_s=1e12))
    inside = Link(1e-6, choose.choice((1e9, 5e9, 5e10, 3e11)))
    each = choose.choice((2, 4))
    return profile, Cluster(devices=tuple(devices), hosts=(Host(each, inside, Link(1e-5, 5e9)),) * (4 // each))


def exhaustive(profile: Profile, cluster: Cluster, schedule: str | None = None, pp: int | None = None) -> float:
    """The shortest step of all combinations under every cut, of those that the engine finds small enough."""
    search, found = Search(Problem(profile, cluster, PlanLimits(), microbatches=None, batch=BATCH)), []
    for plain in every_candidate(search):
        if schedule in (None, plain.family.schedule) and pp in (None, plain.pp):
            for inner in combinations(range(1, LAYERS), len(plain.ends) - 1):
                for reverse in (False,) if search.problem.uniform else (False, True):
                    found.append(search.pricer.quick(replace(plain, ends=(*inner, LAYERS), reverse=reverse)))
    for priced in sorted((each for each in found if each is not None), key=lambda each: each.step_s):
        search.pricer.engine(priced)
        if priced.over_bytes <= 0:
            return priced.step_s
    return INF


def ratio(profile: Profile, cluster: Cluster, best: float, **asked: object) -> float:
    """How long the step of the search is, over that of the best plan."""
    try:
        step = mw.plan(profile, cluster, batch=BATCH, planner="search", seconds=60, **asked).step_s
    except NothingFitsError:
        step = INF
    return 1.0 if step == best else step / best


@pytest.mark.parametrize(("seed", "schedule", "pp"), [(1, "interleaved", 2), (9, "zbv", 2), (3, "onef1b", 4), (14, "chimera", 4)])
def test_the_best_cuts_of_one_schedule(seed: int, schedule: str, pp: int) -> None:
    profile, cluster = problem_of(seed)
    best = exhaustive(profile, cluster, schedule, pp)
    assert ratio(profile, cluster, best, schedule=schedule, pp=pp) <= 1 + 1e-9


@pytest.mark.slow
def test_the_best_of_all_combinations_and_cuts() -> None:
    """Every plan with stages of one width; plans with stages of any width or other devices may be better."""
    problems = [problem_of(seed) for seed in range(24)]
    ratios = [ratio(profile, cluster, exhaustive(profile, cluster)) for profile, cluster in problems]
    assert max(ratios) <= 1.03 and mean(min(1.0, each) for each in ratios) <= 1.0 and mean(ratios) <= 1.005, ratios
