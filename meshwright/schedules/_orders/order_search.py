"""The best words under a cap: a small portfolio, evaluated by running it, then improved on its critical path. Deterministic.

With latency, 1F1B loses two hops per microbatch. Extra warm-up hides them, but it has to be consistent between neighbours: a
pure vector of warm-ups is up to six percent off the optimum, an inconsistent one several times slower. The steps are:

    1  pure warm-up vectors (`vectors`)
    2  the same vectors as limits of a list schedule in time order, forward and backward in time
    3  small changes to the limits of the best of those
    4  swaps of a neighbouring F and B on the critical path, with a list of recent swaps (tabu search)

The search stops when it reaches the lower bound, or when `_windows` shows that nothing shorter exists; this is tested before
and between the slow steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.schedules._orders import window_bound as _windows
from meshwright.schedules._orders.order_strings import INFINITE, Chain, WordRun, Words, bound, in_time, run, vectors, word

FLIP = str.maketrans("FB", "BF")
EPSILON = 1e-6
"""A patience slightly below zero: if both can start at the same time, the forward goes first."""


class _Start(NamedTuple):
    """A list schedule to vary: its makespan, whether it runs backward in time, its limits and patience."""

    makespan: float
    back: bool
    live: Sequence[int]
    patience: Sequence[float]


def search(chain: Chain, cap: Sequence[int], also: Sequence[Words] = ()) -> Words:
    """Returns words for a chain under a cap on live activations per resource."""
    size = len(cap) * chain.microbatches
    goal = bound(chain, cap) * (1 + 1e-12)
    found = vectors(chain, cap)
    starts = [*also, *([word(live, chain.microbatches) for live in vector] for vector in found)]
    pure = best = min(starts, key=lambda words: run(words, chain).makespan)
    makespan = run(best, chain).makespan
    pool: list[_Start] = []
    for vector in [*found, tuple(cap)]:
        for back in (False, True):
            for patience in (0.0, -EPSILON):
                if makespan <= goal:
                    return best
                start = (back, vector, [patience] * len(cap))
                words, time = _listed(chain, *start, limit=1.05 * makespan)
                if words:
                    pool.append(_Start(time, *start))
                if words and time < makespan:
                    makespan, best = time, words
    pool = _different(pool, 8)
    first = pool[:4]
    goal = _windows.raised(chain, cap, goal, makespan)
    listed = makespan
    makespan, best = _varied(chain, cap, pool, makespan, best, goal, tries=min(300, 200_000 // size))
    if makespan < listed:
        goal = _windows.raised(chain, cap, goal, makespan)
    swaps = min(800, 300_000 // size)
    others = [_listed(chain, *start[1:])[0] for start in [*first, *pool]]
    for words in [best, pure, *others, None]:
        if makespan <= goal:
            break
        time, polished = polish(words or best, chain, cap, goal, swaps if words else 4 * swaps)
        if time < makespan:
            makespan, best = time, polished
            goal = _windows.raised(chain, cap, goal, makespan)
    return best


def _different(pool: list[_Start], number: int) -> list[_Start]:
    """Returns the best starts, at most two with the same makespan and direction, because equal ones improve alike."""
    kept: list[_Start] = []
    for start in sorted(pool):
        if sum((start.makespan, start.back) == (other.makespan, other.back) for other in kept) < 2:
            kept.append(start)
    return kept[:number]


def _listed(
    chain: Chain, back: bool, live: Sequence[int], patience: Sequence[float], limit: float = INFINITE
) -> tuple[Words | None, float]:
    """Returns a list schedule and its makespan. If it runs backward in time, the words are reversed again."""
    words = in_time(live, patience, chain.reversed if back else chain, limit=limit)
    if words is None:
        return None, INFINITE
    if back:
        words = [text[::-1].translate(FLIP) for text in words]
    return words, run(words, chain).makespan


def _varied(
    chain: Chain, cap: Sequence[int], pool: list[_Start], makespan: float, best: Words, goal: float, tries: int
) -> tuple[float, Words]:
    """Hill climbing on limits and patience of the starts in the pool; the random numbers are always the same."""
    dice = random.Random(0)
    step = min(*chain.forward, *chain.backward)
    for number in range(tries if pool else 0):
        if makespan <= goal:
            break
        start = pool[number % len(pool)]
        live, patience = list(start.live), list(start.patience)
        for _ in range(dice.choice((1, 1, 2, 3))):
            s = dice.randrange(len(cap))
            if dice.random() < 0.4:
                live[s] = max(1, min(cap[s], live[s] + dice.choice((-1, 1))))
            else:
                patience[s] = step * dice.choice((-0.5, -0.25, -EPSILON, 0, 0.25, 0.5))
        words, time = _listed(chain, start.back, live, patience, limit=start.makespan)
        if words and time <= start.makespan:
            pool[number % len(pool)] = _Start(time, start.back, live, patience)
        if words and time < makespan:
            makespan, best = time, words
    return makespan, best


def polish(words: Words, chain: Chain, cap: Sequence[int], goal: float, tries: int) -> tuple[float, Words]:
    """Swaps neighbouring letters on a critical path, always the best swap that is not recent. Returns the best words seen."""
    words = list(words)
    now = run(words, chain)
    best = (now.makespan, list(words))
    count = 0
    recent: dict[tuple[int, int], int] = {}
    while best[0] > goal and count < tries:
        swaps: list[tuple[float, int, int, str]] = []
        for s, p in critical(words, now, chain):
            text = words[s]
            live = 2 * text.count("F", 0, p) - p
            if (live >= cap[s] if text[p] == "B" else live <= 0) or recent.get((s, p), -1) > count:
                continue
            swapped = text[:p] + text[p + 1] + text[p] + text[p + 2 :]
            count += 1
            swaps.append((run([*words[:s], swapped, *words[s + 1 :]], chain).makespan, s, p, swapped))
            if swaps[-1][0] < now.makespan:
                break
        if not swaps:
            if not recent:
                break
            recent, count = {}, count + 1
            continue
        time, s, p, swapped = min(swaps)
        if time == INFINITE:
            break
        words[s] = swapped
        recent[s, p] = count + 3 * len(swaps) + 10
        now = run(words, chain)
        if time < best[0]:
            best = (time, list(words))
    return best


def critical(words: Words, now: WordRun, chain: Chain) -> list[tuple[int, int]]:
    """Returns places (resource, index) on one critical path where neighbouring letters differ and run back to back."""
    _, forwards, backwards = now
    s = max(range(len(words)), key=lambda r: backwards[r][-1] + chain.after[r])
    p = len(words[0]) - 1
    found = []
    while True:
        letter, before = words[s][p], words[s][p - 1]
        index = words[s].count(letter, 0, p)
        end = (forwards if letter == "F" else backwards)[s][index]
        length = (chain.forward if letter == "F" else chain.backward)[s]
        if p and abs((forwards if before == "F" else backwards)[s][words[s].count(before, 0, p - 1)] + length - end) < 1e-9:
            if before != letter:
                found.append((s, p - 1))
            p -= 1
            continue
        if s == 0 and (letter == "F" or p == 0):
            return found
        s += -1 if letter == "F" else 1
        if hops := chain.there if letter == "F" else chain.back:
            index = _first_in_line((forwards if letter == "F" else backwards)[s], index, hops[s if letter == "F" else s - 1])
        p = [place for place, other in enumerate(words[s]) if other == letter][index]


def _first_in_line(ends: Sequence[float], index: int, busy: float) -> int:
    """Returns the message before which a link had nothing to carry, so that it and all up to `index` went back to back."""
    free, first = 0.0, 0
    for n, end in enumerate(ends[: index + 1]):
        first = n if end >= free else first
        free = max(free, end) + busy
    return first
