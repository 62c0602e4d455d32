"""Orders of F, I and W on a chain of stages, one word per worker; microbatches run first in, first out per letter.

`linear` is the closed form of the zero-bubble family: k live activations, a warm-up that decreases from k on the first worker
to 1 on the last, and the rest of k for pending weight halves. k = D is ZB-H1, k = 2D-1 is ZB-H2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.ir.stage_cost import StageCost


class StageLine(NamedTuple):
    """Times of the stages, latency of a hop, and the number of microbatches."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    latency: float
    microbatches: int

    @classmethod
    def of(cls, costs: Sequence[StageCost], microbatches: int, latency_s: float) -> StageLine:
        """Returns the times of the given stages; recompute runs inside I."""
        inputs = tuple(cost.input_s + cost.recompute_s for cost in costs)
        return cls(tuple(c.forward_s for c in costs), inputs, tuple(c.weight_s for c in costs), latency_s, microbatches)


class Limits(NamedTuple):
    """What each worker may hold: `live` activations from F to W, of which `flight` from F to I."""

    live: tuple[int, ...]
    flight: tuple[int, ...]


def linear(workers: int, microbatches: int, k: int) -> list[str]:
    """Returns the closed form with k live activations."""
    warm = [k - (k - 1) * s // max(workers - 1, 1) for s in range(workers)]
    return trailing(microbatches, warm, [k - ahead for ahead in warm])


def trailing(microbatches: int, warm: Sequence[int], lag: Sequence[int]) -> list[str]:
    """Returns `warm[s]` forwards, then I, W, F in turn, with W `lag[s]` microbatches after I."""
    return [
        "F" * min(ahead, microbatches)
        + "".join(
            "I" * (m < microbatches) + "W" * (0 <= m - late < microbatches) + "F" * (m + ahead < microbatches)
            for m in range(microbatches + late)
        )
        for ahead, late in zip(warm, lag, strict=True)
    ]


def run(words: Sequence[str], line: StageLine) -> tuple[float, float]:
    """Returns makespan and longest worker span of words that cannot deadlock."""
    depth = len(words)
    forwards: list[list[float]] = [[] for _ in words]
    inputs: list[list[float]] = [[] for _ in words]
    begin, clock, position = [0.0] * depth, [0.0] * depth, [0] * depth
    while any(p < len(text) for p, text in zip(position, words, strict=True)):
        for s in [*range(depth), *reversed(range(depth - 1))]:
            time = clock[s]
            for p in range(position[s], len(words[s])):
                letter = words[s][p]
                need: list[float] | None = None
                lag, length, done = line.latency, line.weight[s], None
                if letter == "F":
                    need, length, done = forwards[s - 1] if s else None, line.forward[s], forwards[s]
                elif letter == "I":
                    need, length, done = inputs[s + 1] if s + 1 < depth else forwards[s], line.input[s], inputs[s]
                    lag = line.latency if s + 1 < depth else 0.0
                if need is not None and done is not None:
                    if len(done) >= len(need):
                        break
                    time = max(time, need[len(done)] + lag)
                begin[s] = begin[s] if p else time
                time += length
                position[s] = p + 1
                if done is not None:
                    done.append(time)
            clock[s] = time
    return max(clock), max(end - start for end, start in zip(clock, begin, strict=True))


def heads(line: StageLine) -> list[float]:
    """Returns when the first forward can start on every stage."""
    return [sum(line.forward[:s]) + s * line.latency for s in range(len(line.forward))]


def bound(line: StageLine, limits: Limits, *, span: bool = False) -> float:
    """A lower bound that respects the limits: of the makespan, or (`span`) of the longest span plus the last stage's head.

    Three arguments per stage. Before the first I only a limited number of forwards fits, then the stage idles. At its last I
    only a limited number of W is left, and the path up follows. A forward that reuses memory comes one residence time after
    the previous user, and the path down and up follows the last one.
    """
    forward, inputs, weight, c, count = line
    depth, best, head = len(forward), 0.0, heads(line)
    grace = [head[-1] - h if span else 0.0 for h in head]
    leave = [sum(inputs[j:]) + (depth - 1 - j) * c + weight[j] + grace[j] for j in range(depth)]
    for s in range(depth):
        k = min(limits.live[s], count)
        ahead = min(limits.flight[s], k)
        first = sum(forward) + sum(inputs[s + 1 :]) + (2 * depth - 2 - s) * c
        idle = max(first - ahead * forward[s], head[s])
        load = count * (forward[s] + inputs[s] + weight[s])
        up = max(leave[: s + 1]) - sum(inputs[s:]) - (depth - 1 - s) * c
        last = sum(forward[s:]) + (depth - 1 - s) * c + max(leave)
        residence = sum(forward[s:]) + sum(inputs[s:]) + 2 * (depth - 1 - s) * c + weight[s]
        best = max(best, idle + load + grace[s], idle + load - k * weight[s] + up)
        for n in range((count - 1) % k, count, k):
            before = (idle if n >= ahead else head[s]) + n * forward[s]
            before += max(n - ahead + 1, 0) * inputs[s] + max(n - k + 1, 0) * weight[s]
            best = max(best, before + (count - 1 - n) // k * residence + last)
    return best


def shared(line: StageLine, memory: int, rest: float) -> Limits:
    """Returns limits for a memory of `memory` activations, if one that waits for its W counts `rest`.

    Allows as many forwards in flight as end before the first I can arrive, never more than on the previous worker.
    """
    flight = []
    for s in range(len(line.forward)):
        wait = sum(line.forward[s:]) + sum(line.input[s + 1 :]) + 2 * (len(line.forward) - 1 - s) * line.latency
        flight.append(max(1, min(memory, int(wait / line.forward[s] + 1e-9) if line.forward[s] else memory)))
    flight = [max(flight[s:]) for s in range(len(flight))]
    return Limits(tuple(a + int((memory - a) / rest + 1e-9) for a in flight), tuple(flight))
