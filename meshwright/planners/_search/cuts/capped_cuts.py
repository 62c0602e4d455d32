"""Layers cut into stages of one worker each, so that each stage fits its worker, and the busiest stage has the least work.

Cuts that are even by work can miss the memory of a worker: the first layer may hold most of the parameters, or devices may have
unequal memory. Under a limit on the work of a stage, all places are found where each stage can end, from left to right. The
least limit is found by halving. To fill stages from the left is not enough: a stage has at least one layer, and a full stage may
end before a layer that is too much for the slower device of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.simulate.quick_kernels import njit

Floats = NDArray[np.float64]
PRECISION = 1e-6
"""By how much the work of the busiest stage may exceed the least one."""


MOST = 100_000
"""Layers times stages: larger problems take too long."""


@dataclass(frozen=True)
class Room:
    """What stages may hold. A stage of layers a to b holds `each (P[b] - P[a]) + alive (S[b] - S[a])` bytes of its `bytes`."""

    parameters: Floats
    """P[l]: bytes of the parameters of the first l layers."""
    saved: Floats
    """S[l]: what a forward of the first l layers keeps."""
    each: float
    """Bytes for each byte of parameters: gradients and optimizer state, too."""
    alive: Floats
    """How many activations each stage holds."""
    bytes: Floats
    """The memory of each stage for all of this."""


def endless(layers: int, stages: int) -> Room:
    """Returns memory that never ends."""
    none = np.zeros(layers + 1)
    return Room(none, none, 0.0, np.zeros(stages), np.full(stages, np.inf))


def capped_cuts(sums: Floats, slowness: Floats, room: Room) -> tuple[int, ...] | None:
    """Returns where each stage ends; None if no cut fits, or if the problem is large.

    `sums[l]` is the work of the first l layers; stage k takes `slowness[k]` times its work.
    """
    stages, layers = len(slowness), len(sums) - 1
    if layers * stages > MOST:
        return None
    ends = np.empty(stages, np.int64)
    reached = np.zeros((stages + 1, layers + 1), np.bool_)
    if not _least(sums, slowness, room.parameters, room.saved, room.each, room.alive, room.bytes, reached, ends):
        return None
    return tuple(ends.tolist())


@njit(cache=True)
def _least(
    sums: Any, slowness: Any, parameters: Any, saved: Any, each: float, alive: Any, room: Any, reached: Any, ends: Any
) -> bool:
    """Puts where stages end into `ends`, under the least limit on work that is possible; False if none is."""
    high = sums[-1] * slowness.max() * (1 + 1e-9)
    if not _reach(sums, slowness, high, parameters, saved, each, alive, room, reached):
        return False
    low = sums[-1] / (1.0 / slowness).sum()
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if _reach(sums, slowness, middle, parameters, saved, each, alive, room, reached):
            high = middle
        else:
            low = middle
    _reach(sums, slowness, high, parameters, saved, each, alive, room, reached)
    end = len(sums) - 1
    for k in range(len(slowness) - 1, -1, -1):
        ends[k] = end
        end -= 1
        while not reached[k, end]:  # the latest beginning: the smallest stage fits if any does
            end -= 1
    return True


@njit(cache=True)
def _reach(
    sums: Any, slowness: Any, limit: float, parameters: Any, saved: Any, each: float, alive: Any, room: Any, reached: Any
) -> bool:
    """Marks in `reached[k, l]` whether the first k stages can hold the first l layers; False if they cannot hold all."""
    stages, layers = len(slowness), len(sums) - 1
    reached[:] = False
    reached[0, 0] = True
    for k in range(stages):
        most, far = limit / slowness[k] * (1 + 1e-12), 0
        for at in range(k, layers):
            if not reached[k, at]:
                continue
            end = max(far, at)
            while end < layers and sums[end + 1] - sums[at] <= most:
                held = each * (parameters[end + 1] - parameters[at]) + alive[k] * (saved[end + 1] - saved[at])
                if held > room[k]:
                    break
                end += 1
            for place in range(max(far, at) + 1, end + 1):
                reached[k + 1, place] = True
            far = end
    return bool(reached[stages, layers])
