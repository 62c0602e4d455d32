"""Hanayo (SC'23): Chimera folded in half, so it needs no second replica; stages zigzag over the workers in waves.

    D = 3, one wave: worker 0 holds stages 0 and 5, worker 1 stages 1 and 4, worker 2 stages 2 and 3
    0: 0F0 0F1 0F2 .   .   5F0 5B0 5F1 5B1 ...
    1: .   1F0 1F1 4F0 1F2 4F1 4B0 ...
    2: .   .   2F0 3F0 2F1 3F1 ...

Groups of D microbatches follow each other without a gap. With W waves the bubble is (2D-2) times the longer of a chunk's
forward and backward, independent of the number of microbatches.
"""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule
from meshwright.schedules._orders.wave import steady

COMPARED = ({"waves": 1}, {"waves": 2})


def build(*, workers: int, microbatches: int, waves: int = 1) -> Schedule:
    """Has 2 W D stages; takes any number of microbatches, best in multiples of D."""
    if waves < 1:
        raise MeshwrightError(f"hanayo needs at least one wave, got {waves}", fix="waves=1")
    lists = steady(workers, microbatches, waves=waves)
    return Schedule("hanayo", Placement.zigzag(workers, legs=2 * waves), microbatches, tuple(map(tuple, lists)))
