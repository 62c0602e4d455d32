"""Partition, replication and mapping by dynamic programming (SPP, section "PRM"), exact for a given order of devices.

W(l, s, r, i) is the least bottleneck of a step when the first l layers form s stages on the first i devices, and the last stage
is replicated on the r devices before position i:

    W(l, s, r, i) = min over l', r' of  max( W(l', s - 1, r', i - r),  channel(l', r', r, i),  stage(l', l, r, i) )

    stage     M (time of its layers on r devices) + 2 (r - 1) / r (its parameters) / (slowest link among its devices)
    channel   M (bytes forward and back) / (r r' (slowest link between the two groups of devices))

The channel and everything before it do not depend on l, so for each (s, r, i) they are minimized over r' once. The whole table
takes time S V^2 (L V + L^2). Ties go to the smallest l', then the smallest r'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.profile import ChainCost

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cutting:
    """Stages as runs of layers and of ordered devices: `ends[k]` layers and `used[k]` devices end with stage k."""

    bottleneck_s: float
    ends: tuple[int, ...]
    used: tuple[int, ...]

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return tuple(map(range, (0, *self.ends[:-1]), self.ends))

    @property
    def places(self) -> tuple[range, ...]:
        """The positions of the devices of each stage, in the order of devices."""
        return tuple(map(range, (0, *self.used[:-1]), self.used))


def cuttings(
    shares: Mapping[int, ChainCost], bandwidths: Sequence[Sequence[float]], microbatches: int, *, all_devices: bool = False
) -> list[Cutting]:
    """Returns the cutting with the least bottleneck for every number of stages.

    `shares[r]` is what the layers cost on one of r devices that share a stage; other numbers of devices are not allowed. Devices
    are numbered in their order. The last of them may stay idle, unless `all_devices` is set.
    """
    table = _Table(shares, np.asarray(bandwidths, dtype=np.float64), microbatches)
    found = (table.traced(stages, all_devices=all_devices) for stages in range(1, len(table.best) + 1))
    return [cutting for cutting in found if cutting is not None]


class _Table:
    def __init__(self, shares: Mapping[int, ChainCost], bandwidths: Array, microbatches: int) -> None:
        self.links = np.minimum(bandwidths, bandwidths.T)
        self.count = len(self.links)
        self.times = {
            width: microbatches * np.concatenate([[0.0], np.cumsum(np.add(chain.forward_s, chain.backward_s))])
            for width, chain in shares.items()
        }
        chain = next(iter(shares.values()))
        self.weights = np.concatenate([[0.0], np.cumsum(chain.parameter_bytes)])
        self.crossing = microbatches * np.concatenate([[0.0], np.add(chain.output_bytes, chain.gradient_bytes)])
        self.layers = len(self.weights) - 1
        self.inside = _slowest_inside(self.links)
        self.best: list[Array] = []
        self.choices: list[NDArray[np.int32]] = []
        self._fill()

    def _fill(self) -> None:
        shape = (self.layers + 1, self.count + 1, self.count + 1)
        first = np.full(shape, np.inf)
        for width in self.times:
            if width <= self.count:
                first[1:, width, width] = self._stage(width, width)[0, 1:]
        self.best, self.choices = [first], [np.zeros((*shape, 2), np.int32)]
        stages = [{width: self._stage(width, end) for width in self.times if width < end} for end in range(self.count + 1)]
        for _ in range(2, min(self.layers, self.count) + 1):
            before, here = self.best[-1], np.full(shape, np.inf)
            chosen = np.zeros((*shape, 2), np.int32)
            for end in range(2, self.count + 1):
                between = self.links[:, end - 1]
                for width in range(1, end):
                    left = end - width
                    between = np.minimum(between, self.links[:, left]) if width > 1 else between
                    if width in self.times:
                        self._extend(before, here, chosen, stages[end][width], between[:left], end, width)
            self.best.append(here)
            self.choices.append(chosen)

    def _extend(
        self, before: Array, here: Array, chosen: NDArray[np.int32], stage: Array, between: Array, end: int, width: int
    ) -> None:
        """Fills W(all l, s, width, end) from the table of s - 1 stages."""
        left = end - width
        slowest = np.minimum.accumulate(between[::-1])  # by r': between the last r' devices before the stage and the stage
        with np.errstate(divide="ignore", invalid="ignore"):
            channel = self.crossing[:, None] / (width * np.arange(1, left + 1) * slowest)
        channel[self.crossing == 0.0] = 0.0
        head = np.maximum(before[:, 1 : left + 1, left], channel)
        widths = head.argmin(axis=1)
        start = head[np.arange(len(head)), widths]
        whole = np.maximum(start[:, None], stage)
        cuts = whole.argmin(axis=0)
        here[:, width, end] = whole[cuts, np.arange(len(cuts))]
        chosen[:, width, end, 0] = cuts
        chosen[:, width, end, 1] = widths[cuts] + 1

    def _stage(self, width: int, end: int) -> Array:
        """stage(l', l) for a stage on the `width` devices before position `end`; infinite unless l' < l."""
        times = self.times[width]
        found = times[None, :] - times[:, None]
        if width > 1:
            size = self.weights[None, :] - self.weights[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                reduced = 2 * (width - 1) / width * size / self.inside[end, width]
            found = found + np.where(size > 0.0, reduced, 0.0)
        return np.where(np.tri(self.layers + 1, dtype=bool), np.inf, found)

    def traced(self, stages: int, *, all_devices: bool) -> Cutting | None:
        """Returns the best cutting into `stages` stages; None if there is none."""
        ends = self.best[stages - 1][self.layers]
        if all_devices:
            ends = np.where(np.arange(self.count + 1) == self.count, ends, np.inf)
        width, end = (int(x) for x in np.unravel_index(int(ends.argmin()), ends.shape))
        bottleneck, layer = float(ends[width, end]), self.layers
        if not np.isfinite(bottleneck):
            return None
        found = [(layer, end)]
        for level in range(stages - 1, 0, -1):
            before, other = (int(x) for x in self.choices[level][layer, width, end])
            layer, end, width = before, end - width, other
            found.append((layer, end))
        return Cutting(bottleneck, tuple(layer for layer, _ in reversed(found)), tuple(end for _, end in reversed(found)))


def _slowest_inside(links: Array) -> Array:
    """The slowest link among the `width` devices before position `end`, as [end, width]; infinite for one device."""
    count = len(links)
    found = np.full((count + 1, count + 1), np.inf)
    for end in range(1, count + 1):
        for width in range(2, end + 1):
            first = end - width
            found[end, width] = min(found[end, width - 1], links[first, first + 1 : end].min())
    return found
