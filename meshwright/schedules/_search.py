"""The best words under a cap: a small portfolio, judged by running it, polished on its critical path. No solver, no chance.

With latency, 1F1B pays two hops per microbatch. Extra warm-up buys them back, but it has to stay consistent between
neighbours: a pure vector of warm-ups is up to six percent off the optimum, careless ones several times slower. So:

    1  pure warm-up vectors (`vectors`)
    2  the same vectors as limits of a list schedule in time order, forwards and backwards in time
    3  from the best of these, swaps of a neighbouring F and B on the critical path, with a memory of recent swaps

It stops as soon as the lower bound is met.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import itemgetter

from meshwright.schedules._words import INFINITE, Chain, Run, Words, bound, in_time, run, vectors, word

FLIP = str.maketrans("FB", "BF")
EPSILON = 1e-6
"""Patience just below zero: on equal starts the forward goes first."""


STARTS = 10
"""How many different starts are polished."""
SHAKES = 12
"""How often the best is shaken and polished again."""


def search(chain: Chain, cap: Sequence[int], also: Sequence[Words] = ()) -> Words:
    """Words for a chain under a cap on live activations per resource."""
    goal = bound(chain, cap) * (1 + 1e-12)
    found = vectors(chain, cap)
    pure = [*also, *([word(live, chain.microbatches) for live in vector] for vector in found)]
    makespan, best = min(((run(words, chain).makespan, words) for words in pure), key=itemgetter(0))
    starts: dict[tuple[str, ...], float] = {tuple(best): makespan}
    for vector in [*found, tuple(cap)]:
        for back in (False, True):
            for patience in (0.0, -EPSILON):
                if makespan <= goal:
                    return best
                words = _listed(chain, back, vector, patience, limit=1.05 * makespan)
                if words is not None and tuple(words) not in starts:
                    time = starts[tuple(words)] = run(words, chain).makespan
                    if time < makespan:
                        makespan, best = time, words
    tries = min(800, 400_000 // (len(cap) * chain.microbatches))
    for start in sorted(starts, key=starts.__getitem__)[:STARTS]:
        time, words = polish(list(start), chain, cap, goal, tries)
        if time < makespan:
            makespan, best = time, words
        if makespan <= goal:
            break
    return _shaken(best, makespan, chain, cap, goal, tries)


def _shaken(best: Words, makespan: float, chain: Chain, cap: Sequence[int], goal: float, tries: int) -> Words:
    """A few arbitrary swaps, then polish again; the numbers are always the same ones."""
    dice = random.Random(0)
    for _ in range(SHAKES):
        if makespan <= goal:
            break
        words = list(best)
        for _ in range(dice.randint(2, 6)):
            s = dice.randrange(len(words))
            p = dice.randrange(len(words[s]) - 1)
            if (swapped := _swapped(words[s], p, cap[s])) is not None:
                tried = [*words[:s], swapped, *words[s + 1 :]]
                words = tried if run(tried, chain).makespan < INFINITE else words
        time, polished = polish(words, chain, cap, goal, tries // 2)
        if time <= makespan:
            makespan, best = time, polished
    return best


def _swapped(text: str, p: int, cap: int) -> str | None:
    """The word with letters p and p + 1 exchanged; None where they are the same or memory forbids it."""
    live = 2 * text.count("F", 0, p) - p
    if text[p] == text[p + 1] or (live >= cap if text[p] == "B" else live <= 0):
        return None
    return text[:p] + text[p + 1] + text[p] + text[p + 2 :]


def _listed(chain: Chain, back: bool, live: Sequence[int], patience: float, limit: float) -> Words | None:
    """A list schedule; backwards in time its words are turned round again."""
    words = in_time(live, [patience] * len(live), chain.reversed if back else chain, limit=limit)
    return [text[::-1].translate(FLIP) for text in words] if words and back else words


def polish(words: Words, chain: Chain, cap: Sequence[int], goal: float, tries: int) -> tuple[float, Words]:
    """Swap neighbouring letters on a critical path, always the best swap that is not recent; keep the best words seen."""
    words = list(words)
    now = run(words, chain)
    best = (now.makespan, list(words))
    count = 0
    recent: dict[tuple[int, int], int] = {}
    while best[0] > goal and count < tries:
        swaps: list[tuple[float, int, int, str]] = []
        for s, p in critical(words, now, chain):
            swapped = _swapped(words[s], p, cap[s])
            if swapped is None or recent.get((s, p), -1) > count:
                continue
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


def critical(words: Words, now: Run, chain: Chain) -> list[tuple[int, int]]:
    """Places (resource, index) on one critical path where two neighbouring letters differ and run back to back."""
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
        p = [place for place, other in enumerate(words[s]) if other == letter][index]
