"""The price of overlap: known cases, and laws over random pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.overlap_time import HalfTime, PieceTime, SendTime, turns_of, weave_time


def block(layers: int, attention: float, mlp: float, send: float) -> HalfTime:
    """A transformer on a line: attention, sum, MLP, sum, layer after layer."""
    pieces = (*(PieceTime(seconds) for _ in range(layers) for seconds in (attention, mlp)), PieceTime(0.0))
    return HalfTime(pieces, tuple(SendTime(k, k + 1, send) for k in range(len(pieces) - 1)))


def test_without_halves_all_collectives_are_waited_for() -> None:
    assert weave_time([block(3, 2.0, 3.0, 1.5)]) == pytest.approx(3 * (2.0 + 3.0 + 2 * 1.5))


@pytest.mark.parametrize(("attention", "mlp", "send"), [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5), (0.5, 0.5, 2.0)])
def test_two_halves_reach_the_steady_state_of_sub_pipelining(attention: float, mlp: float, send: float) -> None:
    """Per layer 2 max(a, c) + 2 max(m, c) with halves' times a, m, c; the ends of the run add less than one layer."""
    time = weave_time([block(20, attention, mlp, send)] * 2)
    steady = 20 * (2 * max(attention, send) + 2 * max(mlp, send))
    assert steady <= time + 1e-9 <= steady + 2 * (attention + mlp + 2 * send)


PIECES = st.lists(st.builds(PieceTime, st.floats(0, 5), st.floats(0, 2)), min_size=1, max_size=8)


@st.composite
def halves(draw: st.DrawFn) -> HalfTime:
    pieces = tuple(draw(PIECES))
    pairs = st.tuples(st.integers(-1, len(pieces) - 1), st.integers(0, len(pieces) - 1)).filter(lambda p: p[0] < p[1])
    sends = draw(st.lists(st.builds(lambda p, s: SendTime(p[0], p[1], s), pairs, st.floats(0, 3)), max_size=6))
    return HalfTime(pieces, tuple(dict.fromkeys(sends)))


@settings(deadline=None)
@given(halves(), halves())
def test_bounds(a: HalfTime, b: HalfTime) -> None:
    """All turns are taken; never faster than all compute or one half alone, never slower than one after the other."""
    turns = turns_of([a, b])
    assert (turns.count(0), turns.count(1)) == (len(a.pieces), len(b.pieces))
    time = weave_time([a, b], turns)
    compute = sum(p.seconds + p.tail_s for half in (a, b) for p in half.pieces)
    sends = sum(s.seconds for half in (a, b) for s in half.sends)
    assert max(compute, weave_time([a]), weave_time([b])) <= time + 1e-9
    assert time <= compute + sends + 1e-9
