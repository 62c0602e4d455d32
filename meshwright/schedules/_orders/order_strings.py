"""Orders of forwards and whole backwards on a chain of resources, written as one word over F and B per resource.

Microbatches are equal, so first in, first out loses nothing and a word describes an order completely: `FFFBFBFBBB` starts with
three forwards, alternates, and drains. What is alive on a stage is alive on the previous stage, so a cap also holds downstream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from meshwright.ir.action import Action, Op
from meshwright.ir.stage_cost import StageCost

INFINITE = float("inf")
Words = list[str]


class Chain(NamedTuple):
    """Times of a chain: forward and backward per resource, latency of a hop, and time after a resource's last backward.

    `there` and `back` are how long a message occupies the link to the next resource, one direction of it; empty if no time.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    latency: float
    after: tuple[float, ...]
    microbatches: int
    there: tuple[float, ...] = ()
    back: tuple[float, ...] = ()

    @classmethod
    def of(cls, costs: Sequence[StageCost], microbatches: int, latency_s: float) -> Chain:
        """Returns stages without links between them, as a chain."""
        forward, backward = tuple(c.forward_s for c in costs), tuple(c.backward_s + c.recompute_s for c in costs)
        return cls(forward, backward, latency_s, tuple(c.sync_s for c in costs), microbatches)

    @property
    def reversed(self) -> Chain:
        """The same problem backward in time: forwards and backwards are exchanged."""
        return self._replace(forward=self.backward, backward=self.forward, there=self.back, back=self.there)

    @property
    def hops(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """How long a message occupies the link to a resource: from the one before it, and from the one after it."""
        none = (0.0,) * (len(self.forward) - 1)
        return (0.0, *(self.there or none)), (*(self.back or none), 0.0)


class WordRun(NamedTuple):
    """The result of running words: the makespan (infinite if they deadlock) and the ends of all forwards and backwards."""

    makespan: float
    forwards: list[list[float]]
    backwards: list[list[float]]


def word(live: int, microbatches: int) -> str:
    """Returns `live` forwards, then alternating backwards and forwards, then the rest; 1F1B is `live = D - s`."""
    live = max(1, min(live, microbatches))
    return "F" * live + "BF" * (microbatches - live) + "B" * live


def caps(cap: int | None, chain: Chain) -> list[int]:
    """Returns the cap of every resource; None means no cap."""
    limit = chain.microbatches if cap is None else min(cap, chain.microbatches)
    return [limit] * len(chain.forward)


def actions_of(words: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Converts words over the letters of ops into lists of actions, microbatches in order."""
    lists = []
    for stage, text in enumerate(words):
        seen: Counter[str] = Counter()
        row = []
        for letter in text:
            row.append(Action(Op(letter), stage, seen[letter]))
            seen[letter] += 1
        lists.append(tuple(row))
    return tuple(lists)


def run(words: Words, chain: Chain) -> WordRun:
    """Runs every word strictly in order, each letter as soon as its input exists."""
    last = len(words) - 1
    forwards: list[list[float]] = [[] for _ in words]
    backwards: list[list[float]] = [[] for _ in words]
    position, time = [0] * len(words), [0.0] * len(words)
    down, up = chain.hops
    came, returned = [0.0] * len(words), [0.0] * len(words)  # when the last message has arrived from either side
    work = list(range(len(words)))
    while work:
        s = work.pop()
        text, now, f, b = words[s], time[s], forwards[s], backwards[s]
        before = len(f), len(b)
        for letter in text[position[s] :]:
            if letter == "F":
                if s and len(f) >= len(forwards[s - 1]):
                    break
                if s:
                    came[s] = max(came[s], forwards[s - 1][len(f)]) + down[s]
                    now = max(now, came[s] + chain.latency)
                now += chain.forward[s]
                f.append(now)
            else:
                inputs = backwards[s + 1] if s < last else f
                if len(b) >= len(inputs):
                    break
                if s < last:
                    returned[s] = max(returned[s], inputs[len(b)]) + up[s]
                    now = max(now, returned[s] + chain.latency)
                now += chain.backward[s]
                b.append(now)
        position[s], time[s] = len(f) + len(b), now
        if len(b) > before[1] and s:
            work.append(s - 1)
        if len(f) > before[0] and s < last:
            work.append(s + 1)
    done = all(p == len(text) for p, text in zip(position, words, strict=True))
    return WordRun(max(map(sum, zip(time, chain.after, strict=True))) if done else INFINITE, forwards, backwards)


def bound(chain: Chain, cap: Sequence[int]) -> float:
    """A lower bound that respects the cap: longest paths over data, order and reuse of memory, plus the remaining work."""
    f, b = _heads(chain, cap, (0.0,) * len(cap))
    back = chain.reversed
    rf, rb = _heads(back, cap, chain.after)
    last = chain.microbatches - 1
    pairs = [(s, i) for s in range(len(cap)) for i in range(chain.microbatches)]
    whole = [f[s][i] + chain.forward[s] + rb[s][last - i] for s, i in pairs]
    return max(whole + [b[s][i] + chain.backward[s] + rf[s][last - i] for s, i in pairs])


def _heads(chain: Chain, cap: Sequence[int], release: Sequence[float]) -> tuple[list[list[float]], list[list[float]]]:
    """Returns the earliest starts of all forwards and backwards."""
    forward, backward, latency, _, count, *_ = chain
    depth = len(forward)
    f = [[0.0] * count for _ in forward]
    b = [[0.0] * count for _ in forward]
    first = [release[0]]
    down, up = chain.hops
    came, returned = [0.0] * depth, [0.0] * depth
    for s in range(1, depth):
        first.append(max(release[s], first[-1] + forward[s - 1] + down[s] + latency))
    for i in range(count):
        for s in range(depth):
            start = first[s] + i * forward[s] + max(0, i - cap[s] + 1) * backward[s]
            if s:
                came[s] = max(came[s], f[s - 1][i] + forward[s - 1]) + down[s]
                start = max(start, came[s] + latency)
            start = max(start, f[s][i - 1] + forward[s] if i else 0.0)
            f[s][i] = max(start, b[s][i - cap[s]] + backward[s] if i >= cap[s] else 0.0)
        for s in reversed(range(depth)):
            start = f[s][i] + forward[s]
            if s < depth - 1:
                returned[s] = max(returned[s], b[s + 1][i] + backward[s + 1]) + up[s]
                start = returned[s] + latency
            start = max(start, b[s][i - 1] + backward[s] if i else 0.0)
            b[s][i] = max(start, first[s] + (i + 1) * forward[s] + i * backward[s])
    return f, b


def vectors(chain: Chain, cap: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns warm-up vectors: about how many periods a microbatch spends at or after a stage; never growing along the chain."""
    both = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    down, up = chain.hops
    hops = [*(a + b + 2 * chain.latency for a, b in zip(down[1:], up, strict=False)), 0.0]
    residence = list(accumulate(work + hop for work, hop in zip(reversed(both), reversed(hops), strict=True)))[::-1]
    busiest = max([*both, *chain.there, *chain.back]) or 1.0
    found: dict[tuple[int, ...], None] = {}
    for period in (busiest, max(busiest, *(time / k for time, k in zip(residence, cap, strict=True)))):
        for eighth in range(9):
            found[tuple(max(1, min(k, int(t / period + eighth / 8))) for t, k in zip(residence, cap, strict=True))] = None
        for steep in (1, 1.25, 1.5, 1.75, 2):
            for more in (0.0, 0.5, 0.999):
                deeper = [int(1 + steep * (t - residence[-1]) / period + more) for t in residence]
                found[tuple(min(k, live) for live, k in zip(deeper, cap, strict=True))] = None
    return [vector for vector in found if all(a >= b for a, b in pairwise(vector))]


def in_time(
    live: Sequence[int], patience: Sequence[float], chain: Chain, *, limit: float = INFINITE, warm: Sequence[int] | None = None
) -> Words | None:
    """A list schedule in time order, or None if it exceeds `limit`.

    At most `live[s]` activations are alive. The next backward goes first, unless it would start more than `patience[s]` after
    the next forward could. With `warm`, if both can start at the same time, the forward goes first while fewer are alive.
    """
    forward, backward, latency, _, count, *_ = chain
    depth = len(forward)
    free = [0.0] * depth
    done = [[0, 0] for _ in forward]  # forwards and backwards that have started
    inputs: list[list[float]] = [[0.0] * count, *([] for _ in forward[1:])]  # when forwards can start
    returns: list[list[float]] = [[] for _ in forward]
    words: list[list[str]] = [[] for _ in forward]
    down, up = chain.hops
    tail = [0.0, *accumulate(time + hop + latency for time, hop in zip(backward, up[:-1], strict=False))]

    def pick(s: int) -> tuple[float, int, str]:
        i, j = done[s]
        f = b = INFINITE
        if i < count and i - j < live[s] and i < len(inputs[s]):
            f = max(free[s], inputs[s][i])
        if j < len(returns[s]):
            b = max(free[s], returns[s][j])
        back = b < INFINITE and (b <= f + patience[s] if warm is None or b != f else i - j >= warm[s])
        return (b, s, "B") if back else (f, s, "F")

    nexts = [pick(s) for s in range(depth)]
    for _ in range(2 * count * depth):
        at, s, letter = min(nexts)
        if at == INFINITE:
            return None
        ahead = letter == "F"
        words[s].append(letter)
        free[s] = at + (forward if ahead else backward)[s]
        done[s][0 if ahead else 1] += 1
        if free[s] + (count - done[s][0]) * forward[s] + (count - done[s][1]) * backward[s] + tail[s] > limit:
            return None
        neighbour = s + 1 if ahead else s - 1
        if neighbour == depth:
            returns[s].append(free[s])
        elif neighbour >= 0:
            came, hop = (inputs, down) if ahead else (returns, up)
            before = came[neighbour][-1] - latency if came[neighbour] else 0.0
            came[neighbour].append(max(before, free[s]) + hop[neighbour] + latency)
            nexts[neighbour] = pick(neighbour)
        nexts[s] = pick(s)
    return ["".join(letters) for letters in words]
