"""SPP's execution order."""

from __future__ import annotations

from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import ChannelOrder, Schedule


def build(*, workers: int, microbatches: int, strict: bool = True) -> Schedule:
    resources = 2 * workers - 1

    def order(k: int, forward: Action, backward: Action) -> list[Action]:
        blocks = []
        for mb in range(microbatches):
            last = k == resources - 1
            blocks.append((k + mb, 0 if last else 1, forward._replace(mb=mb)))
            blocks.append((2 * resources - 2 - k + mb, 1 if last else 0, backward._replace(mb=mb)))
        return [a for *_, a in sorted(blocks, key=lambda b: b[:2])]

    lists = tuple(tuple(order(2 * s, Action(Op.F, s), Action(Op.B, s))) for s in range(workers))
    channels = tuple(
        ChannelOrder((s, s + 1), tuple(order(2 * s + 1, Action(Op.F, s), Action(Op.B, s + 1)))) for s in range(workers - 1)
    )
    return Schedule("listed", Placement.line(workers), microbatches, lists, channels=channels if strict else ())
