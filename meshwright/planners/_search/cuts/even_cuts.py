"""Layers cut into stages so that the busiest stage has the least work, and the others are as even as that allows.

Bisection over the work of the busiest stage, with stages filled from the left. It is exact for stages of equal speed. A stage can
be slower than others: then its share of the layers is smaller, and `capped_cuts.py` finds the least work exactly, unless there
are very many layers and stages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planners._search.cuts.capped_cuts import capped_cuts, endless
from meshwright.simulate.quick_kernels import njit

Floats = NDArray[np.float64]
STEPS = 60
"""Halvings of the interval in which the bottleneck lies."""


def even_cuts(sums: Floats, slowness: Sequence[float]) -> tuple[int, ...]:
    """Returns where each stage ends. `sums[l]` is the work of the first l layers; stage k takes `slowness[k]` times its work."""
    layers, stages = len(sums) - 1, len(slowness)
    assert 1 <= stages <= layers
    if stages == 1:
        return (layers,)
    slow, ends = np.array(slowness), np.empty(stages, np.int64)
    unequal = slow.max() > slow.min()
    if unequal and (found := capped_cuts(sums, slow, endless(layers, stages))) is not None:
        return _spread(sums.tolist(), slowness, busiest(sums, slowness, found), found)
    limit = float(_least_limit(sums, slow, float(np.diff(sums).max()), ends))
    return _spread(sums.tolist(), slowness, limit, ends.tolist())


def busiest(sums: Floats | list[float], slowness: Sequence[float], ends: Sequence[int]) -> float:
    """Returns the work of the busiest stage."""
    return float(max(s * (sums[b] - sums[a]) for s, a, b in zip(slowness, (0, *ends[:-1]), ends, strict=True)))


@njit(cache=True)
def _least_limit(sums: Any, slowness: Any, largest: float, ends: Any) -> Any:
    """Returns the least work of the busiest stage, and puts where stages end at the latest into `ends`."""
    low = sums[-1] / (1.0 / slowness).sum()
    high = (low + largest) * slowness.max() * (1 + 1e-9)
    if not _reach(sums, slowness, high, ends):
        high = sums[-1] * slowness.max()
    for _ in range(STEPS):
        if high - low <= 1e-9 * high:
            break
        middle = (low + high) / 2
        if _reach(sums, slowness, middle, ends):
            high = middle
        else:
            low = middle
    _reach(sums, slowness, high, ends)
    return high


@njit(cache=True)
def _reach(sums: Any, slowness: Any, limit: float, ends: Any) -> bool:
    """Finds where stages end at the latest if none works longer than `limit`; False if the layers do not fit."""
    layers, stages = len(sums) - 1, len(slowness)
    at = 0
    for k in range(stages):
        before = at
        at = min(np.searchsorted(sums, sums[at] + limit / slowness[k] * (1 + 1e-12), side="right") - 1, layers - (stages - 1 - k))
        if at <= before:
            return False
        ends[k] = at
    return bool(at == layers)


def _spread(sums: list[float], slowness: Sequence[float], limit: float, left: Sequence[int]) -> tuple[int, ...]:
    """Moves ends towards equal work, without exceeding the limit."""
    layers, stages = len(sums) - 1, len(slowness)
    first = [layers] * stages  # where stages end at the earliest
    at = layers
    for k in range(stages - 1, 0, -1):
        start = bisect_left(sums, sums[at] - limit / slowness[k] * (1 + 1e-12))
        at = max(min(start, at - 1), k)
        first[k - 1] = at
    share = 0.0
    whole = sum(1.0 / s for s in slowness)
    ends: list[int] = []
    before = 0
    for k, slow in enumerate(slowness):
        share += 1.0 / slow
        goal = min(bisect_left(sums, sums[-1] * share / whole), layers)
        if goal > 0 and sums[goal] - sums[-1] * share / whole > sums[-1] * share / whole - sums[goal - 1]:
            goal -= 1
        reach = bisect_right(sums, sums[before] + limit / slow * (1 + 1e-12)) - 1
        end = min(max(goal, first[k], before + 1), left[k], reach) if k < stages - 1 else layers
        ends.append(max(end, before + 1))
        before = ends[-1]
    return tuple(ends) if busiest(sums, slowness, ends) <= limit * (1 + 1e-9) else tuple(left)
