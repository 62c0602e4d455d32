"""How far from the optimum: CP-SAT proves chimera optimal on its placement and judges what is built from costs and a cap."""

from __future__ import annotations

import pytest

from meshwright import Cluster, Link, Schedule, StageCost, Timeline, schedules, simulate
from meshwright.ir.action import Op
from meshwright.schedules._orders import order_strings as _words
from meshwright.schedules._orders import split_orders as _halves
from meshwright.schedules._orders import window_bound as _windows
from tests.support.helpers import run
from tests.support.optimum import Proof, optimum

Ratio = tuple[int, int, int]


def timed(name: str, d: int, n: int, ratio: Ratio, c: int, cap: int | None, **options: object) -> tuple[Schedule, Timeline]:
    f, i, w = ratio
    costs = [StageCost(float(f), float(i), float(w))] * d
    cluster = Cluster(Link(float(c))) if c else None
    more = {} if cap is None else {"memory": cap}
    schedule = schedules.build(name, workers=d, microbatches=n, costs=costs, cluster=cluster, **more, **options)
    timeline = simulate(schedule, costs, cluster)
    if cap is not None:
        assert max(timeline.peak(w) for w in range(d)) <= cap
    return schedule, timeline


def judged(name: str, d: int, n: int, ratio: Ratio, c: int, cap: int, seconds: float = 60) -> tuple[float, Proof, float]:
    """Our makespan, the solver's proof, and the best bound known without it."""
    options = {"variant": "auto"} if name == "zero_bubble" else {}
    schedule, timeline = timed(name, d, n, ratio, c, cap, **options)
    f, i, w = ratio
    costs = [StageCost(float(f), float(i), float(w))] * d
    if name == "zero_bubble":
        each = (cap,) * d
        known = _halves.bound(_halves.StageLine.of(costs, n, float(c)), _halves.Limits(each, each))
    else:
        chain = _words.Chain.of(costs, n, float(c))
        each = tuple(_words.caps(cap, chain))
        known = _windows.bound(chain, each, _words.bound(chain, each), timeline.makespan_s)
    if timeline.makespan_s <= known * (1 + 1e-9):
        return timeline.makespan_s, Proof(True, round(timeline.makespan_s), known), known
    times = {Op.F: f, Op.B: i + w, Op.I: i, Op.W: w}
    return timeline.makespan_s, optimum(schedule, times, latency=c, cap=cap, hint=timeline, low=known, seconds=seconds), known


@pytest.mark.parametrize("d", [4, 6, 8])
def test_chimera_is_optimal_on_its_placement(d: int) -> None:
    schedule = schedules.build("chimera", workers=d, microbatches=d)
    timeline = run("chimera", d, d)
    proof = optimum(schedule, {Op.F: 1, Op.B: 2}, hint=timeline)
    assert proof.proved and proof.makespan == timeline.makespan_s == d + (2 * d - 2) * 2


@pytest.mark.parametrize(("d", "n"), [(4, 8), (6, 12)])
def test_steady_chimera_is_optimal_within_its_memory_where_direct_is_not(d: int, n: int) -> None:
    schedule = schedules.build("chimera", workers=d, microbatches=n, mode="steady")
    timeline = run("chimera", d, n, mode="steady")
    proof = optimum(schedule, {Op.F: 1, Op.B: 2}, cap=d, hint=timeline, seconds=30)
    assert proof.bound <= timeline.makespan_s < run("chimera", d, n).makespan_s
    if d == 4:
        assert proof.proved and proof.makespan == timeline.makespan_s == 28


def test_zbv_and_split_chimera_are_optimal_on_their_placements() -> None:
    for name, d, n, options in (("zbv", 3, 3, {}), ("zbv", 2, 4, {}), ("chimera", 4, 4, {"split": True})):
        schedule = schedules.build(name, workers=d, microbatches=n, **options)
        costs = [StageCost(1.0, 1.0, 1.0)] * schedule.stages
        timeline = simulate(schedule, costs)
        cap = schedule.stages if name == "zbv" else d
        proof = optimum(schedule, {Op.F: 1, Op.I: 1, Op.W: 1}, cap=cap, hint=timeline)
        assert proof.proved and proof.makespan == timeline.makespan_s


def test_anchors_of_latency_and_memory() -> None:
    """One more activation than 1F1B buys the latency back."""
    even = (10, 10, 10)
    assert timed("onef1b", 8, 16, even, 1, 8)[1].makespan_s == 730
    assert timed("onef1b", 8, 16, even, 1, 9)[1].makespan_s == 706
    assert timed("listed", 8, 16, even, 1, 9)[1].makespan_s == 706
    assert timed("zero_bubble", 8, 16, even, 1, 8, variant="auto")[1].makespan_s == 578
    assert timed("zero_bubble", 8, 16, even, 1, 9, variant="auto")[1].makespan_s == 557
    for name in ("onef1b", "zero_bubble"):
        options = {"variant": "auto"} if name == "zero_bubble" else {}
        plain, more = (timed(name, 8, 16, even, 1, cap, **options)[1].makespan_s for cap in (8, 9))
        assert more <= 0.97 * plain


@pytest.mark.parametrize("name", ["onef1b", "listed", "zero_bubble"])
@pytest.mark.parametrize(
    ("d", "n", "c", "cap", "ratio"), [(4, 8, 3, 5, (10, 13, 7)), (4, 12, 1, 4, (13, 10, 7)), (3, 9, 2, 4, (10, 7, 13))]
)
def test_small_points_against_the_optimum(name: str, d: int, n: int, c: int, cap: int, ratio: Ratio) -> None:
    makespan, proof, known = judged(name, d, n, ratio, c, cap, seconds=20)
    assert proof.proved and proof.makespan is not None
    assert known <= proof.makespan + 1e-6, "the bound is one"
    assert makespan <= 1.01 * proof.makespan


POINTS = [
    (d, (4 if c == 10 else 2) * d, c, cap, ratio)
    for d in (4, 8, 16)
    for cap in (d, d + 1, 3 * d // 2, 2 * d)
    for c, ratio in ((10, (100, 100, 100)), (30, (100, 130, 70) if cap % 2 else (130, 100, 70)))
    if not (c == 10 and (cap == 2 * d or (d, cap) == (4, 4)))
]


def test_there_are_sixty_points() -> None:
    assert 3 * len(POINTS) == 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onef1b", "listed", "zero_bubble"])
@pytest.mark.parametrize(("d", "n", "c", "cap", "ratio"), POINTS)
def test_latency_under_a_cap_is_near_the_optimum(name: str, d: int, n: int, c: int, cap: int, ratio: Ratio) -> None:
    makespan, proof, known = judged(name, d, n, ratio, c, cap)
    if proof.proved and proof.makespan is not None:
        assert makespan <= 1.01 * proof.makespan
    else:
        assert makespan <= 1.03 * max(known, proof.bound)
