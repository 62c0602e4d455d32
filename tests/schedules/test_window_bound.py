"""The bound by refutation never passes the optimum, and often meets it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import Cluster, Link, StageCost, schedules, simulate
from meshwright.ir.action import Op
from meshwright.schedules._orders import order_strings as _words
from meshwright.schedules._orders import window_bound as _windows
from meshwright.schedules._orders.order_strings import Chain
from tests.support.optimum import optimum


def words(count: int, cap: int, done: int = 0, alive: int = 0) -> list[str]:
    """Every word of `count` forwards and backwards with at most `cap` alive."""
    if done == count and not alive:
        return [""]
    found = ["F" + rest for rest in words(count, cap, done + 1, alive + 1)] if done < count and alive < cap else []
    return found + (["B" + rest for rest in words(count, cap, done, alive - 1)] if alive else [])


def best_of_all(chain: Chain, caps: list[int]) -> float:
    """The optimum by running every combination of words."""
    every = itertools.product(*(words(chain.microbatches, cap) for cap in caps))
    return min(_words.run(list(one), chain).makespan for one in every)


def bounds(chain: Chain, caps: list[int], high: float) -> tuple[float, float]:
    low = _words.bound(chain, caps)
    return low, _windows.bound(chain, caps, low, high)


times = st.integers(0, 9).map(float)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Chain, list[int]]:
    """Up to three resources with times and caps of their own, small enough to try every order."""
    depth = draw(st.integers(1, 3))
    count = draw(st.integers(1, {1: 6, 2: 5, 3: 4}[depth]))
    each = st.tuples(*[times] * depth)
    caps = draw(st.lists(st.integers(1, count), min_size=depth, max_size=depth))
    return Chain(draw(each), draw(each), draw(times), draw(each), count), caps


@given(chains())
@settings(max_examples=250, deadline=None)
def test_it_is_a_bound_on_every_order(drawn: tuple[Chain, list[int]]) -> None:
    chain, caps = drawn
    best = best_of_all(chain, caps)
    assert not _windows.refuted(chain, caps, best)
    low, known = bounds(chain, caps, 2 * best)
    assert low <= known <= best
    assert _windows.bound(chain, caps, low, best) <= best


@pytest.mark.parametrize("ratio", [(10, 10, 10), (13, 10, 7), (10, 3, 3)])
@pytest.mark.parametrize("c", [0, 1, 3, 8])
def test_it_is_a_bound_on_what_the_solver_proves(c: int, ratio: tuple[int, int, int]) -> None:
    for d, n, cap in ((3, 6, 2), (3, 7, 4), (4, 6, 3), (4, 8, 4), (4, 8, 5), (5, 8, 6)):
        costs = [StageCost(*map(float, ratio))] * d
        cluster = Cluster(Link(float(c)))
        schedule = schedules.build("onef1b", workers=d, microbatches=n, costs=costs, cluster=cluster, memory=cap)
        timeline = simulate(schedule, costs, cluster)
        chain = Chain.of(costs, n, float(c))
        caps = _words.caps(cap, chain)
        low = _words.bound(chain, caps)
        proof = optimum(
            schedule, {Op.F: ratio[0], Op.B: ratio[1] + ratio[2]}, latency=c, cap=cap, hint=timeline, low=low, seconds=20
        )
        known = _windows.bound(chain, caps, low, timeline.makespan_s)
        assert proof.makespan is not None and low <= known <= proof.makespan
        if proof.proved:
            assert not _windows.refuted(chain, caps, proof.makespan)


@pytest.mark.parametrize(("d", "n", "c", "cap", "ours"), [(8, 32, 10, 8, 12380.0), (8, 16, 30, 9, 7680.0), (4, 8, 30, 4, 3780.0)])
def test_it_meets_orders_that_a_longest_path_does_not(d: int, n: int, c: int, cap: int, ours: float) -> None:
    forward = 130.0 if c == 30 and cap % 2 == 0 else 100.0
    backward = 170.0 if forward == 130 else 200.0
    chain = Chain((forward,) * d, (backward,) * d, float(c), (0.0,) * d, n)
    low, known = bounds(chain, [cap] * d, ours)
    assert low < 0.995 * ours < ours * (1 - 2e-5) < known < ours
    assert not _windows.refuted(chain, [cap] * d, ours)


def test_longer_is_never_refuted_where_shorter_is_not() -> None:
    chain = Chain((100.0,) * 6, (200.0,) * 6, 30.0, (0.0,) * 6, 12)
    verdicts = [_windows.refuted(chain, [7] * 6, 4000.0 + 25 * step) for step in range(80)]
    assert verdicts == sorted(verdicts, reverse=True) and len(set(verdicts)) == 2
