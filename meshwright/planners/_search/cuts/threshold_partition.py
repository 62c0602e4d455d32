"""Stages of any width in one order of devices, for a limit on the busiest one: the shortest round trip under that limit.

Among plans whose every stage and channel is at most `limit`, minimize the time of one microbatch through all stages and back:

    T(i, r, l) = P(l) / r + min over l' in [low(l), l) of ( min over r' of T(i - r, r', l') + channel(l') ) - P(l') / r

T is for the first l layers on the first i devices, the last stage on the r devices before i. Stage work is a difference of prefix
sums, so the minimum over l' is one over a window that only moves forward. The number of stages is free. A sweep over limits gives
one plan each; a simulation decides between them. Under a tight limit i devices cannot have finished more than some layers, nor
fewer than what the remaining devices can take: other states are skipped (`first` and `last`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.simulate.quick_kernels import njit

Floats = NDArray[np.float64]


@njit(cache=True)
def fill(
    works: Any,
    weights: Any,
    crossing: Any,
    widths: Any,
    inside: Any,
    between: Any,
    limit: float,
    count: int,
    M: int,
    first: Any,
    last: Any,
    table: Any,
    from_layer: Any,
    from_width: Any,
) -> None:
    """Fills T and the choices; `works[k]` are the prefix sums of layers on one of `widths[k]` devices.

    T of i devices is filled for `first[i]` to `last[i]` layers only.
    """
    layers = works.shape[1] - 1
    kinds = len(widths)
    best = np.empty(layers + 1)
    which = np.empty(layers + 1, np.int64)
    queue = np.empty(layers + 1, np.int64)
    value = np.empty(layers + 1)
    for i in range(1, count + 1):
        for k in range(kinds):
            r = widths[k]
            if r > i:
                continue
            rate = inside[i, k]
            share = 2.0 * (r - 1) / r / rate if r > 1 else 0.0
            left = i - r
            for l in range(first[i], last[i] + 1):
                table[i, k, l] = np.inf
            if left == 0:
                for l in range(max(1, first[i]), last[i] + 1):
                    if M * works[k, l] + share * weights[l] <= limit:
                        table[i, k, l] = works[k, l]
                        from_layer[i, k, l] = 0
                        from_width[i, k, l] = -1
                continue
            start, stop = max(1, first[left]), min(layers - 1, last[left])
            best[start : stop + 1] = np.inf
            for j in range(kinds):
                if widths[j] > left:
                    continue
                per = 1.0 / (max(r, widths[j]) * between[i, k, j])
                row = table[left, j]
                for l in range(start, stop + 1):  # without branches, so that it becomes vector instructions
                    hop = crossing[l] * per
                    found = row[l] + 2.0 * hop
                    better = (M * hop <= limit) & (found < best[l])
                    best[l] = found if better else best[l]
                    which[l] = j if better else which[l]
            head, tail, low, new = 0, 0, start, start - 1
            for l in range(max(start + 1, first[i]), last[i] + 1):
                while new < min(l - 1, stop):
                    new += 1
                    if best[new] == np.inf:
                        continue
                    value[new] = best[new] - works[k, new]
                    while tail > head and value[queue[tail - 1]] >= value[new]:
                        tail -= 1
                    queue[tail] = new
                    tail += 1
                while low < l and M * (works[k, l] - works[k, low]) + share * (weights[l] - weights[low]) > limit:
                    low += 1
                while tail > head and queue[head] < low:
                    head += 1
                if tail > head:
                    at = queue[head]
                    table[i, k, l] = value[at] + works[k, l]
                    from_layer[i, k, l] = at
                    from_width[i, k, l] = which[at]


class ThresholdTable:
    """The tables of one order of devices, reused for all limits."""

    def __init__(
        self,
        works: dict[int, Floats],
        weights: Floats,
        crossing: Floats,
        rates: Floats,
        microbatches: int,
    ) -> None:
        self.widths = np.array(sorted(works), np.int64)
        self.works = np.stack([np.concatenate([[0.0], np.cumsum(works[int(w)])]) for w in self.widths])
        self.weights = np.concatenate([[0.0], np.cumsum(weights)])
        self.crossing = np.concatenate([[0.0], crossing])
        self.count, self.M = len(rates), microbatches
        self.inside, self.between = _windows(np.minimum(rates, rates.T), self.widths)
        self.share = np.concatenate([[0.0], np.cumsum((np.diff(self.works) * self.widths[:, None]).min(axis=0))])
        shape = (self.count + 1, len(self.widths), self.works.shape[1])
        self.table = np.full(shape, np.inf)
        self.layer_of = np.zeros(shape, np.int16 if shape[2] < 2**15 else np.int32)
        self.width_of = np.zeros(shape, np.int8)

    def solve(self, limit: float) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns where stages end, in layers and in devices, of the plan with the shortest round trip; None if there is none."""
        most = np.arange(self.count + 1) * limit / self.M * (1 + 1e-9)  # what so many devices can do in a step, at best
        first = np.searchsorted(self.share, self.share[-1] - most[::-1])
        last = np.searchsorted(self.share, most, side="right") - 1
        fill(
            self.works,
            self.weights,
            self.crossing,
            self.widths,
            self.inside,
            self.between,
            limit,
            self.count,
            self.M,
            first,
            last,
            self.table,
            self.layer_of,
            self.width_of,
        )
        layer = self.works.shape[1] - 1
        whole = np.where((last == layer)[:, None], self.table[:, :, layer], np.inf)
        i, k = divmod(int(whole.argmin()), whole.shape[1])
        if not np.isfinite(whole[i, k]):
            return None
        ends, used = [], []
        while True:
            ends.append(layer)
            used.append(i)
            before, kind = int(self.layer_of[i, k, layer]), int(self.width_of[i, k, layer])
            if kind < 0:
                return tuple(reversed(ends)), tuple(reversed(used))
            i -= int(self.widths[k])
            layer, k = before, kind

    def least(self) -> float:
        """The least limit that has a plan, to one percent; to ten on large problems."""
        low = self.M * float(self.works[:, -1].min()) / max(1, self.count)
        high = self.M * float(self.works[0, -1]) + 1e-12
        low = min(low, high) / 2
        precise = 1.01 if self.table.size < 4_000_000 else 1.1
        while high > low * precise:
            middle = (low * high) ** 0.5
            if self.solve(middle) is None:
                low = middle
            else:
                high = middle
        return high

    def plans(self, factors: Sequence[float]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns different plans, for limits from the least on."""
        least = self.least()
        found = (self.solve(least * factor) for factor in factors)
        return list(dict.fromkeys(plan for plan in found if plan is not None))


def _windows(rates: Floats, widths: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The slowest link among the r devices before i, and between these and the r' devices before them; `widths` ascend."""
    count, kinds = len(rates), len(widths)
    inside = np.full((count + 1, kinds), np.inf)
    between = np.full((count + 1, kinds, kinds), np.inf)
    rows = rates.copy()
    np.fill_diagonal(rows, np.inf)
    done = 1
    for j, width in enumerate(widths.tolist()):
        while done < width:  # rows[a] becomes the least over rows a .. a + width - 1
            step = min(done, width - done)
            rows = np.minimum(rows[:-step], rows[step:])
            done += step
        _least_of_rows(rows, j, widths, inside, between)
    return inside, between


@njit(cache=True)
def _least_of_rows(rows: Any, j: int, widths: Any, inside: Any, between: Any) -> None:
    """Fills in what follows from the least over each `widths[j]` rows: along each row, columns are added one by one."""
    width, count = widths[j], rows.shape[1]
    for a in range(len(rows)):
        least = np.inf
        for b in range(a, a + width):
            least = min(least, rows[a, b])
        inside[a + width, j] = least
        least, b = np.inf, a + width
        for k in range(len(widths)):
            if a + width + widths[k] > count:
                break
            while b < a + width + widths[k]:
                least = min(least, rows[a, b])
                b += 1
            between[b, k, j] = least
