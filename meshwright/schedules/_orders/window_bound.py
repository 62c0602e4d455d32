"""A lower bound by refutation: suppose some order takes at most M, and narrow when every letter can start until none can.

On one resource a word is a way through a lattice. (i, a) stands for i forwards done and a activations alive: a forward leads
to (i + 1, a + 1), a backward to (i, a - 1), and a cap is a wall.

    alive                 a letter may start inside its window only; the way from (0, 0) to (N, 0)
      2        o--F.      gives the earliest time of every point, the way back the latest
      1   o--F/   B\\
      0  F/         B--
         forwards done ->

Proof. Take any order within the caps that ends by M; number forwards and backwards of a resource in the order they start. The
i-th forward further down starts after i forwards here have ended, each a hop later, and likewise upwards for backwards: so
microbatches in order lose nothing, and a window narrowed by a neighbour's still holds the start. On a resource the order is a way
through the lattice whose letters start in their windows. No way reaches a point before its earliest time (each letter starts
once its window is open and the letter before has ended) nor leaves it after its latest, so a step that cannot start
between the two is on no such way, and what the other steps leave of a window still holds the start. When no way is left there
is no such order, and M is too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.schedules._orders.order_strings import INFINITE, Chain

TOLERANCE = 1e-5
"""How close to the longest refuted makespan the bisection comes, relative."""
SIZE = 150_000
"""Lattice points, above which `raised` does not try: a test takes about two seconds there, and a tenth at 16 x 64."""
ROUNDS = 20
"""Sweeps of one test; stopping early refutes less, never wrongly."""


class Windows(NamedTuple):
    """The earliest and latest starts of all forwards and backwards of one resource."""

    forward_from: list[float]
    forward_to: list[float]
    backward_from: list[float]
    backward_to: list[float]


class _Letters(NamedTuple):
    """What a lattice is made of: how long letters take, the cap, and the rounding that is forgiven."""

    forward: float
    backward: float
    cap: int
    slack: float


def bound(chain: Chain, cap: Sequence[int], low: float, high: float) -> float:
    """A makespan that no order can beat, between a known bound and the makespan of a known order."""
    middle = high * (1 - TOLERANCE)
    while high - low > TOLERANCE * high:
        if refuted(chain, cap, middle):
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return low


def raised(chain: Chain, cap: Sequence[int], low: float, makespan: float) -> float:
    """The makespan of a known order if it is optimal to the tolerance and one quick test shows it, else the known bound."""
    if low >= makespan or chain.microbatches * sum(cap) > SIZE:
        return low
    return makespan if refuted(chain, cap, makespan * (1 - TOLERANCE)) else low


def refuted(chain: Chain, cap: Sequence[int], makespan: float) -> bool:
    """Whether windows show that no order takes at most `makespan`."""
    depth, count = len(cap), chain.microbatches
    windows = [
        Windows([0.0] * count, [makespan] * count, [0.0] * count, [makespan - chain.after[s] - chain.backward[s]] * count)
        for s in range(depth)
    ]
    stale = set(range(depth))
    for s in ROUNDS * [*range(depth), *reversed(range(depth))]:
        if s not in stale:
            continue
        stale.discard(s)
        letters = _Letters(chain.forward[s], chain.backward[s], cap[s], 1e-9 * makespan)
        narrowed = _narrowed(_linked(windows, s, chain), letters)
        if narrowed is None:
            return True
        if narrowed != windows[s]:
            windows[s] = narrowed
            stale |= {s - 1, s + 1} & set(range(depth))
    return False


def _linked(windows: Sequence[Windows], s: int, chain: Chain) -> Windows:
    """A resource's windows, after what the neighbours' windows say through the data."""
    forward_from, forward_to, backward_from, backward_to = windows[s]
    if s:
        above, down, up = windows[s - 1], chain.forward[s - 1] + chain.latency, chain.backward[s] + chain.latency
        forward_from = [max(a, b + down) for a, b in zip(forward_from, above.forward_from, strict=True)]
        backward_to = [min(a, b - up) for a, b in zip(backward_to, above.backward_to, strict=True)]
    if s + 1 < len(windows):
        below, down, up = windows[s + 1], chain.forward[s] + chain.latency, chain.backward[s + 1] + chain.latency
        forward_to = [min(a, b - down) for a, b in zip(forward_to, below.forward_to, strict=True)]
        backward_from = [max(a, b + up) for a, b in zip(backward_from, below.backward_from, strict=True)]
    return Windows(forward_from, forward_to, backward_from, backward_to)


def _earliest(windows: Windows, letters: _Letters) -> list[list[float]]:
    """When each point of the lattice can be reached, by forwards done and activations alive."""
    forward, backward, cap, slack = letters
    row = [0.0] + [INFINITE] * cap
    rows = [row]
    for i in range(len(windows.forward_from) + 1):
        if i:
            opens, closes = windows.forward_from[i - 1], windows.forward_to[i - 1] + slack
            starts = [time if time > opens else opens for time in row[:-1]]
            row = [INFINITE, *(start + forward if start <= closes else INFINITE for start in starts)]
            rows.append(row)
        for alive in range(min(cap, i), 0, -1):
            start = max(row[alive], windows.backward_from[i - alive])
            if start <= windows.backward_to[i - alive] + slack:
                row[alive - 1] = min(row[alive - 1], start + backward)
    return rows


def _narrowed(windows: Windows, letters: _Letters) -> Windows | None:
    """What is left of the windows when only steps on a whole way count; None if there is no way."""
    forward, backward, cap, slack = letters
    count = len(windows.forward_from)
    rows = _earliest(windows, letters)
    left = Windows([INFINITE] * count, [-INFINITE] * count, [INFINITE] * count, [-INFINITE] * count)
    after: list[float] = []
    for i in range(count, -1, -1):
        latest = [-INFINITE] * (cap + 1)
        if i == count:
            latest[0] = INFINITE
        for alive in range(min(cap, i) + 1):
            if rows[i][alive] == INFINITE:
                continue
            if i < count and alive < cap:
                start = max(rows[i][alive], windows.forward_from[i])
                last = min(after[alive + 1] - forward, windows.forward_to[i])
                if start <= last + slack:
                    left.forward_from[i] = min(left.forward_from[i], start)
                    left.forward_to[i] = max(left.forward_to[i], last)
                    latest[alive] = last
            if alive:
                j = i - alive
                start = max(rows[i][alive], windows.backward_from[j])
                last = min(latest[alive - 1] - backward, windows.backward_to[j])
                if start <= last + slack:
                    left.backward_from[j] = min(left.backward_from[j], start)
                    left.backward_to[j] = max(left.backward_to[j], last)
                    latest[alive] = max(latest[alive], last)
        after = latest
    return left if after[0] > -INFINITE else None
