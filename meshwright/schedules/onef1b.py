"""1F1B (DAPPLE, PipeDream-flush): as soon as a backward can run, alternate.

0: F0 F1 F2 .  .  .  B0 B0 .  B1 ..
1: .  F0 F1 .  B0 B0 F2 B1 B1 ...
2: .  .  F0 B0 B0 F1 B1 B1 ...
"""

from __future__ import annotations

from typing import Literal

from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule


def build(*, workers: int, microbatches: int, warmup: Literal[1, 2, 4] = 1) -> Schedule:
    """`warmup` times the usual number of forwards before the first backward: deeper hides slow transfers."""
    period = tuple(one_f_one_b(stage, microbatches, warmup * (workers - 1 - stage)) for stage in range(workers))
    return Schedule("onef1b", Placement.line(workers), microbatches, period)


def one_f_one_b(stage: int, microbatches: int, warm: int) -> tuple[Action, ...]:
    """`warm` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm = min(warm, microbatches)
    forwards = [Action(Op.F, stage, mb) for mb in range(microbatches)]
    backwards = [Action(Op.B, stage, mb) for mb in range(microbatches)]
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return (*forwards[:warm], *steady, *backwards[microbatches - warm :])
