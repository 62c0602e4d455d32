"""GPipe: all forwards, then all backwards; every activation of the step is alive in between.

    0: F0 F1 F2 .  .  .  .  .  .  B0 =  B1 =  B2 =
    1: .  F0 F1 F2 .  .  .  B0 =  B1 =  B2 =  .  .
    2: .  .  F0 F1 F2 B0 =  B1 =  B2 =  .  .  .  .

Backwards run in the order of the forwards.
"""

from __future__ import annotations

from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule


def build(*, workers: int, microbatches: int) -> Schedule:
    """Forwards in order, then backwards in the same order."""
    period = tuple(tuple(Action(op, stage, mb) for op in (Op.F, Op.B) for mb in range(microbatches)) for stage in range(workers))
    return Schedule("gpipe", Placement.line(workers), microbatches, period)
