"""GEMS: two replicas in opposite directions take turns, so a worker holds one activation at a time.

    0: F0 .  .  .  B0 =  F1 B1 =  F2 .  .  .  .  B2 =
    1: .  F0 B0 =  F1 .  .  .  .  B1 =  F2 B2 =  .  .

Even microbatches run down, odd ones up; the next forward follows the wave of backwards.
"""

from __future__ import annotations

from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule


def build(*, workers: int, microbatches: int) -> Schedule:
    """Runs forward and backward of one microbatch, then of the next one from the other end."""
    placement = Placement.mirrored(workers)
    period = tuple(
        tuple(
            Action(op, workers - 1 - worker if mb % 2 else worker, mb, mb % 2)
            for mb in range(microbatches)
            for op in (Op.F, Op.B)
        )
        for worker in range(workers)
    )
    return Schedule("gems", placement, microbatches, period)
