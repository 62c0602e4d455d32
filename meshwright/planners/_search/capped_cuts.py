"""Layers cut into stages of one worker each, so that each stage fits its worker, and the busiest stage has the least work.

Cuts that are even by work can miss the memory of a worker: the first layer may hold most of the parameters, or devices may have
unequal memory. Stages are filled from the left, each as far as its work and its memory allow. Both only grow with a stage, so if
the layers do not fit that way, no cut fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.simulate.quick_kernels import njit

Floats = NDArray[np.float64]
STEPS = 40
"""Halvings of the interval in which the least work of the busiest stage lies."""


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


def capped_cuts(sums: Floats, slowness: Floats, room: Room) -> tuple[int, ...] | None:
    """Returns where each stage ends; None if no cut fits. `sums[l]` is the work of the first l layers."""
    ends = np.empty(len(slowness), np.int64)
    memory = (room.parameters, room.saved, room.each, room.alive, room.bytes)
    if not _least(sums, slowness, *memory, ends):
        return None
    return tuple(ends.tolist())


@njit(cache=True)
def _least(sums: Any, slowness: Any, parameters: Any, saved: Any, each: float, alive: Any, room: Any, ends: Any) -> bool:
    """Puts where stages end into `ends`, under the least limit of work that is possible; False if none is."""
    high = sums[-1] * slowness.max() * (1 + 1e-9)
    if not _reach(sums, slowness, high, parameters, saved, each, alive, room, ends):
        return False
    low = sums[-1] / (1.0 / slowness).sum()
    for _ in range(STEPS):
        if high - low <= 1e-6 * high:
            break
        middle = (low + high) / 2
        if _reach(sums, slowness, middle, parameters, saved, each, alive, room, ends):
            high = middle
        else:
            low = middle
    return _reach(sums, slowness, high, parameters, saved, each, alive, room, ends)


@njit(cache=True)
def _reach(
    sums: Any, slowness: Any, limit: float, parameters: Any, saved: Any, each: float, alive: Any, room: Any, ends: Any
) -> bool:
    """Fills stages from the left under this limit of work; False if the layers do not fit."""
    layers, stages, at = len(sums) - 1, len(slowness), 0
    for k in range(stages):
        last = layers - (stages - 1 - k)
        far = min(np.searchsorted(sums, sums[at] + limit / slowness[k] * (1 + 1e-12), side="right") - 1, last)
        near = at
        while near < far:  # the largest end within the memory
            middle = (near + far + 1) // 2
            held = each * (parameters[middle] - parameters[at]) + alive[k] * (saved[middle] - saved[at])
            if held <= room[k]:
                near = middle
            else:
                far = middle - 1
        if near == at:
            return False
        at = ends[k] = near
    return bool(at == layers)
