"""Split backwards under a memory cap as a job shop: first in, first out turns the cap into plain precedence.

Forward m of stage s waits for W of microbatch m - cap on its stage, so any order that respects the graph keeps the cap and
cannot deadlock. Orders come from list schedules (Giffler and Thompson): the worker with the earliest possible completion
decides, and of the actions it could start by then it runs the one with the longest remaining path. Each pass forward in time
is followed by one backward in time. A small fixed portfolio varies how long to wait and how much I and W count. The search
stops at the lower bound.

Operations are numbered 3 (s N + m) + k, with k = 0, 1, 2 for F, I, W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from meshwright.schedules._orders.split_orders import Limits, StageLine, bound, heads, linear, run, trailing

Arc = tuple[int, int, float]
Links = list[list[tuple[int, float]]]
ROOT = 1.1673039782614187
"""The root of g^5 = g + 1: its powers cover four dimensions evenly."""


def auto(line: StageLine, limits: Limits, *, span: bool = False) -> list[str]:
    """Returns words with the shortest makespan found (`span`: longest worker span); never longer than fitting closed forms."""
    workers, count, low = len(limits.live), line.microbatches, bound(line, limits, span=span) * (1 + 1e-12)
    size = 3 * workers * count
    shop = _Shop(line, limits, span=span)

    def value(words: list[str]) -> float:
        return run(words, line)[1] + heads(line)[-1] if span else run(words, line)[0]

    tight = limits.flight == limits.live
    k = min(limits.live)
    forms = [linear(workers, count, x) for x in dict.fromkeys((k, min(k, 2 * workers - 1), min(k, workers)))]
    if not tight:
        forms = [trailing(count, limits.flight, [x - a for x, a in zip(limits.live, limits.flight, strict=True)])]
    best = min(forms, key=value)
    least = value(best)
    ahead = min(limits.flight[0], count)
    ideal = shop.linked(_chain(count, 0, "F" * ahead + "IWF" * (count - ahead) + "IW" * ahead))
    seeds = [(ideal, shop.tails(*ideal)), (shop.plain, shop.along(best))]
    unit = sum(line.forward + line.input + line.weight) / workers
    for number, (wait, wait_back, more_i, more_w) in enumerate(_portfolio(max(48, min(150, 60_000 // size)))):
        if least <= low:
            break
        if number in (16, 40):
            seeds = [*seeds[:2], (shop.plain, shop.along(best))]
        (before, after), rank = seeds[number % len(seeds)]
        more = (0.0, more_i * unit, more_w * unit)
        zero = [0.0] * size
        ends, there = shop.listed(before, after, [way + more[op % 3] for op, way in enumerate(rank)], wait, zero)
        _, back = shop.listed(after, before, ends, wait_back, shop.final)
        for words in (there, [text[::-1] for text in back]):
            if (found := value(words)) < least - 1e-9:
                least, best = found, words
    return best


def _portfolio(tries: int) -> Iterator[tuple[float, float, float, float]]:
    """Yields how long to wait forward and backward in time, and the extra weight of I and W, in units of F + I + W."""
    for number in range(tries):
        u = [(0.5 + number / ROOT**power) % 1 for power in (1, 2, 3, 4)]
        yield (0.5, 1.0, 0.0, 0.0) if number < 2 else (u[0], 0.5 + u[1] / 2, 0.9 * u[2] - 0.6, 0.9 * u[3] - 0.3)


def _chain(count: int, stage: int, text: str) -> list[Arc]:
    """Returns arcs that put the operations of a worker into the order of a word."""
    seen, ops = [0, 0, 0], []
    for k in map("FIW".index, text):
        ops.append(3 * (stage * count + seen[k]) + k)
        seen[k] += 1
    return [(a, b, 0.0) for a, b in pairwise(ops)]


class _Shop:
    """The graph of a line of stages under limits, and list schedules on it."""

    def __init__(self, line: StageLine, limits: Limits, *, span: bool) -> None:
        self.workers, self.count = len(limits.live), line.microbatches
        self.size = 3 * self.workers * self.count
        times = (line.forward, line.input, line.weight)
        self.worker = [op // 3 // self.count for op in range(self.size)]
        self.length = [times[op % 3][self.worker[op]] for op in range(self.size)]
        self.final = [0.0] * self.size
        if span:  # a worker that starts late may end late
            for s, head in enumerate(heads(line)):
                self.final[3 * (s + 1) * self.count - 1] = heads(line)[-1] - head
        self.arcs = list(self._graph(line, limits))
        self.plain = self.linked([])

    def _graph(self, line: StageLine, limits: Limits) -> Iterator[Arc]:
        """Yields (a, b, lag): b starts at least `lag` after the end of a."""
        count = self.count
        for s in range(self.workers):
            for m in range(count):
                f = 3 * (s * count + m)
                if s:
                    yield f - 3 * count, f, line.latency
                yield (f + 1 + 3 * count, f + 1, line.latency) if s < self.workers - 1 else (f, f + 1, 0.0)
                yield f + 1, f + 2, 0.0
                if m:
                    yield from ((f + k - 3, f + k, 0.0) for k in range(3))
                if m >= limits.live[s]:
                    yield f + 2 - 3 * limits.live[s], f, 0.0
                if m >= limits.flight[s]:
                    yield f + 1 - 3 * limits.flight[s], f, 0.0

    def linked(self, more: list[Arc]) -> tuple[Links, Links]:
        """Returns the predecessors and successors of every operation, with `more` arcs added to the graph."""
        before: Links = [[] for _ in range(self.size)]
        after: Links = [[] for _ in range(self.size)]
        for a, b, lag in [*self.arcs, *more]:
            before[b].append((a, lag))
            after[a].append((b, lag))
        return before, after

    def along(self, words: Sequence[str]) -> list[float]:
        """Returns the tails if every worker keeps the order of its word."""
        return self.tails(*self.linked([arc for s, text in enumerate(words) for arc in _chain(self.count, s, text)]))

    def tails(self, before: Links, after: Links) -> list[float]:
        """Returns the longest path from the end of each operation to the end of everything."""
        tail = list(self.final)
        left = [len(links) for links in after]
        stack = [op for op, number in enumerate(left) if not number]
        while stack:
            op = stack.pop()
            for need, lag in before[op]:
                tail[need] = max(tail[need], tail[op] + self.length[op] + lag)
                left[need] -= 1
                if not left[need]:
                    stack.append(need)
        return tail

    def listed(
        self, before: Links, after: Links, rank: Sequence[float], wait: float, release: Sequence[float]
    ) -> tuple[list[float], list[str]]:
        """Returns ends and words of a list schedule; `wait` is the share of the time to the earliest completion to wait."""
        missing = [len(links) for links in before]
        ready, end = list(release), [0.0] * self.size
        pool: list[list[int]] = [[] for _ in range(self.workers)]
        clock = [0.0] * self.workers
        words: list[list[str]] = [[] for _ in range(self.workers)]
        first = [float("inf")] * self.workers
        pick = [(0.0, -1)] * self.workers

        def look(w: int) -> None:
            if not pool[w]:
                first[w] = float("inf")
                return
            starts = [max(ready[op], clock[w]) for op in pool[w]]
            earliest = min(starts)
            first[w] = min([start + self.length[op] for start, op in zip(starts, pool[w], strict=True)])
            limit = earliest + wait * (first[w] - earliest)
            open_ = [
                (rank[op], -i)
                for i, (start, op) in enumerate(zip(starts, pool[w], strict=True))
                if start < limit or start == earliest
            ]
            chosen = -max(open_)[1]
            pick[w] = starts[chosen], pool[w][chosen]

        for op, number in enumerate(missing):
            if not number:
                pool[self.worker[op]].append(op)
        for w in range(self.workers):
            look(w)
        for _ in range(self.size):
            w = first.index(min(first))
            start, op = pick[w]
            pool[w].remove(op)
            words[w].append("FIW"[op % 3])
            clock[w] = end[op] = start + self.length[op]
            for later, lag in after[op]:
                missing[later] -= 1
                ready[later] = max(ready[later], end[op] + lag)
                if not missing[later]:
                    pool[self.worker[later]].append(later)
                    if self.worker[later] != w:
                        look(self.worker[later])
            look(w)
        return end, ["".join(letters) for letters in words]
