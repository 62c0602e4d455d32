"""1F1B without a flush, for schedules that keep several parameter versions: fill once, alternate forever, drain at the end.

With w = D-1-s forwards ahead, stage s runs F(m + w), B(m) for every m. A round is N microbatches; `version(stage, mb)` is
the version that a microbatch reads, and U#k comes right after the last backward of round k.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Lists, Schedule


def endless(
    name: str, *, workers: int, microbatches: int, rounds: int, version: Callable[[int, int], int], settled: int
) -> Schedule:
    """Builds rounds of `microbatches` on a line of workers; from round `settled` on, versions grow by one per round."""
    base = settled + -(-(workers - 1) // microbatches)

    def stage_list(stage: int, rounds: int) -> list[Action]:
        total, ahead = rounds * microbatches, min(workers - 1 - stage, rounds * microbatches)
        order = [(Op.F, mb) for mb in range(ahead)]
        for mb in range(total):
            order += [(Op.F, mb + ahead)] if mb + ahead < total else []
            order += [(Op.B, mb)]
        actions = []
        for op, mb in order:
            actions.append(Action(op, stage, mb, version=version(stage, mb)))
            if op is Op.B and mb % microbatches == microbatches - 1:
                actions.append(Action(Op.U, stage, version=mb // microbatches))
        return actions

    def cut(stage: int, actions: list[Action]) -> int:
        """Returns the index after the last update before the period, when `settled` rounds are finished."""
        return 0 if settled == 0 else 1 + actions.index(Action(Op.U, stage, version=settled - 1))

    short = [stage_list(stage, min(rounds, base)) for stage in range(workers)]
    placement = Placement.line(workers)
    if rounds <= base:
        return Schedule(name, placement, microbatches, (), prologue=tuple(map(tuple, short)), repeats=0, flush=False)
    longer = [stage_list(stage, base + 1) for stage in range(workers)]
    prologue: Lists = tuple(tuple(a[: cut(s, a)]) for s, a in enumerate(short))
    drain: Lists = tuple(tuple(a[cut(s, a) :]) for s, a in enumerate(short))
    period: Lists = tuple(tuple(a[cut(s, a) : cut(s, a) + len(a) - len(short[s])]) for s, a in enumerate(longer))
    return Schedule(name, placement, microbatches, period, prologue=prologue, drain=drain, repeats=rounds - base, flush=False)
