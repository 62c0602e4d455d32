"""A lower bound by refutation: assume that an order takes at most M, and narrow the start windows of all letters until none fits.

On one resource a word is a path through a lattice. Point (i, a) means i forwards done and a activations alive: a forward leads
to (i + 1, a + 1), a backward to (i, a - 1), and a cap is a wall.

    alive                 a letter may only start inside its window; the paths from (0, 0) to (N, 0)
      2        o--F.      give the earliest time of every point, the reversed paths the latest
      1   o--F/   B\\
      0  F/         B--
         forwards done ->

Proof. Take any order within the caps that ends by M. Number the forwards and backwards of a resource in the order they start.
Forward i on the next resource starts after i forwards have ended here, each a hop later; the same holds upwards for
backwards. So keeping microbatches in order loses nothing, and a window narrowed by a neighbour's window still contains the
start. On a resource the order is a path through the lattice whose letters start in their windows. No path reaches a point
before its earliest time (each letter starts once its window is open and the previous letter has ended) or leaves it after
its latest time. So a step that cannot start between the two is on no such path, and what the other steps leave of a window
still contains the start. If no path is left, no such order exists, and M is too short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.schedules._orders.order_strings import INFINITE, Chain

TOLERANCE = 1e-5
"""Relative distance to the longest refuted makespan at which the bisection stops."""
SIZE = 150_000
"""Lattice points above which `raised` does not try. A test takes about two seconds at this size, and 0.1 s at 16 x 64."""
ROUNDS = 20
"""Sweeps of one test. Stopping early refutes less, but never wrongly."""


class Windows(NamedTuple):
    """The earliest and latest starts of all forwards and backwards of one resource."""

    forward_from: list[float]
    forward_to: list[float]
    backward_from: list[float]
    backward_to: list[float]


class _Letters(NamedTuple):
    """The data of a lattice: durations of the letters, the cap, and the tolerance for rounding."""

    forward: float
    backward: float
    cap: int
    slack: float


def bound(chain: Chain, cap: Sequence[int], low: float, high: float) -> float:
    """Returns a makespan that no order can beat, between a known bound and the makespan of a known order."""
    middle = high * (1 - TOLERANCE)
    while high - low > TOLERANCE * high:
        if refuted(chain, cap, middle):
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return low


def raised(chain: Chain, cap: Sequence[int], low: float, makespan: float) -> float:
    """Returns the makespan of a known order if one quick test proves it optimal to the tolerance, else the known bound."""
    if low >= makespan or chain.microbatches * sum(cap) > SIZE:
        return low
    return makespan if refuted(chain, cap, makespan * (1 - TOLERANCE)) else low


def refuted(chain: Chain, cap: Sequence[int], makespan: float) -> bool:
    """True if the windows show that no order takes at most `makespan`."""
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
    """Returns the windows of a resource, narrowed by the windows of its neighbours."""
    forward_from, forward_to, backward_from, backward_to = windows[s]
    there, back = chain.hops
    if s:
        above, down, up = windows[s - 1], chain.forward[s - 1] + chain.latency, chain.backward[s] + chain.latency
        forward_from = [max(a, b) for a, b in zip(forward_from, _arrivals(above.forward_from, down, there[s]), strict=True)]
        backward_to = [min(a, b) for a, b in zip(backward_to, _departures(above.backward_to, up, back[s - 1]), strict=True)]
    if s + 1 < len(windows):
        below, down, up = windows[s + 1], chain.forward[s] + chain.latency, chain.backward[s + 1] + chain.latency
        forward_to = [min(a, b) for a, b in zip(forward_to, _departures(below.forward_to, down, there[s + 1]), strict=True)]
        backward_from = [max(a, b) for a, b in zip(backward_from, _arrivals(below.backward_from, up, back[s]), strict=True)]
    return Windows(forward_from, forward_to, backward_from, backward_to)


def _arrivals(starts: Sequence[float], more: float, busy: float) -> Iterator[float]:
    """Yields when messages arrive at the earliest, one after the other over a link; they leave `more` after these starts."""
    last = 0.0
    for start in starts:
        last = max(last, start + more) + busy
        yield last


def _departures(starts: Sequence[float], more: float, busy: float) -> list[float]:
    """Returns when the senders of messages start at the latest, so that these starts are not missed."""
    last, found = INFINITE, []
    for start in reversed(starts):
        last = min(last, start - more) - busy
        found.append(last)
    return found[::-1]


def _earliest(windows: Windows, letters: _Letters) -> list[list[float]]:
    """Returns when each lattice point can be reached, by forwards done and activations alive."""
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
    """Returns what is left of the windows if only steps on a complete path count; None if there is no path."""
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
