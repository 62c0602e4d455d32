"""Cut a chain into runs: minimize the heaviest run, then, within a tolerance, the price of the cuts.

The result is exact (dynamic programming over runs and layers), and equal inputs give equal cuts on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

TOLERANCE = 0.08
"""The heaviest run may exceed the optimum by this fraction if that makes the cuts cheaper."""


def partition(costs: Sequence[float], edges: Sequence[int], runs: int) -> tuple[float, tuple[int, ...]]:
    """Returns the minimal heaviest run and the starts of the runs; `edges[i]` is the price of a cut after item i."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = _bottleneck(sums, runs)
    limit = best * (1 + TOLERANCE)
    # For each number of runs and each end: (price of cuts, heaviest run, sum of squares, starts).
    rows: list[tuple[float, float, float, tuple[int, ...]] | None] = [None] * len(sums)
    rows[0] = (0, 0.0, 0.0, (0,))
    for run in range(runs):
        fresh: list[tuple[float, float, float, tuple[int, ...]] | None] = [None] * len(sums)
        for end in range(run + 1, len(costs) - (runs - run - 1) + 1):
            for start in range(end - 1, run - 1, -1):
                load = sums[end] - sums[start]
                if load > limit and end - start > 1:
                    break
                before = rows[start]
                if before is None or load > limit:
                    continue
                price = before[0] + (edges[end - 1] if end < len(costs) else 0)
                found = (price, max(before[1], load), before[2] + load * load, (*before[3], end))
                here = fresh[end]
                if here is None or found < here:
                    fresh[end] = found
        rows = fresh
    last = rows[len(costs)]
    assert last is not None, "the optimum itself is within the limit"
    return best, last[3]


def _bottleneck(sums: Sequence[float], runs: int) -> float:
    """Returns the weight of the heaviest run, minimized over all cuts."""
    count = len(sums) - 1
    row = [inf] * (count + 1)
    row[0] = 0.0
    for run in range(runs):
        fresh = [inf] * (count + 1)
        for end in range(run + 1, count - (runs - run - 1) + 1):
            for start in range(end - 1, run - 1, -1):
                load = sums[end] - sums[start]
                if load >= fresh[end]:
                    break
                fresh[end] = min(fresh[end], max(row[start], load))
        row = fresh
    return row[count]
