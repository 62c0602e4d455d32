"""Shifted critical path (Merak, TPDS'23): 1F1B with recompute, and three changes that each shorten the critical path.

    early  R needs the kept input, not the gradient: recompute while waiting for the gradient
    last   the last stage runs B right after F, so its activations are still there: no recompute on it
    full   the stage before the last is now the busiest: it runs its third forward before its first backward

    p = 4, m = 8, F = 1, B = 2, R = 1: 44 with recompute inside B, then 41, 39, 38
    2: ..012raarbb3rcc4rdd5ree6rff7rggrhh....      (digits forward, r recompute, letters backward)
    3: ...0aa1bb2cc3dd.4ee.5ff.6gg.7hh.......

With fewer than three microbatches there is no third forward to move, and `full` equals `last`.
"""

from __future__ import annotations

from typing import Literal

from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.passes.recompute import recompute
from meshwright.schedules.onef1b import one_f_one_b


def build(*, workers: int, microbatches: int, level: Literal["early", "last", "full"] = "full") -> Schedule:
    """1F1B with R actions before the backwards; `level` says how many of the changes apply."""
    lists = [one_f_one_b(stage, microbatches, workers - 1 - stage) for stage in range(workers)]
    if level == "full" and workers > 1 and microbatches >= 3:
        lists[workers - 2] = _pulled(workers - 2, microbatches)
    plain = Schedule("shifted", Placement.line(workers), microbatches, tuple(lists))
    last = Recompute(1.0, early=True) if level == "early" else Recompute(0.0)
    return recompute(plain, [Recompute(1.0, early=True)] * (workers - 1) + [last])


def _pulled(stage: int, microbatches: int) -> tuple[Action, ...]:
    """Returns F0 F1 F2, B0, B1, then F and B in turn."""
    forwards = [Action(Op.F, stage, mb) for mb in range(microbatches)]
    backwards = [Action(Op.B, stage, mb) for mb in range(microbatches)]
    steady = [action for pair in zip(forwards[3:], backwards[2:], strict=False) for action in pair]
    return (*forwards[:3], *backwards[:2], *steady, *backwards[2 + len(forwards[3:]) :])
