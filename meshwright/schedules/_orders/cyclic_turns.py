"""The stagger of cyclic data parallelism, as control edges (writer, reader). Without them all workers would run in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.action import Action, Op
from meshwright.ir.profile import StageCost

Turn = tuple[Action, Action]
UNEVEN = 1.001
"""Stages whose times differ by more than this ratio are not equal."""


def stagger(workers: int, stages: int, costs: Sequence[StageCost], *, rounds: int) -> list[Turn]:
    """Returns the turns of equal stages, or only the delayed starts of unequal ones."""
    times = [cost.forward_s + cost.backward_s for cost in costs]
    if max(times) <= UNEVEN * min(times):
        return even_turns(stages, range(rounds * workers))
    return start_turns(workers, stages, costs)


def even_turns(stages: int, mbs: range) -> list[Turn]:
    """Stage j goes from F(m) to B(m - (K - j)) to F(m + 1). In the fill, a start waits for the previous one's second stage."""
    turns = []
    for mb in mbs:
        for stage in range(stages):
            earlier = mb - 1 - (stages - 1 - stage)
            if earlier >= 0:
                turns.append((Action(Op.B, stage, earlier), Action(Op.F, stage, mb)))
            elif stage == 0 and mb > 0:
                turns.append((Action(Op.F, 1, mb - 1), Action(Op.F, 0, mb)))
            ahead = mb + stages - 1 - stage
            if ahead in mbs and ahead != mb:
                turns.append((Action(Op.F, stage, ahead), Action(Op.B, stage, mb)))
    return turns


def start_turns(workers: int, stages: int, costs: Sequence[StageCost]) -> list[Turn]:
    """Worker M - k leads worker M - k + 1 by forward and backward of stage k, through an edge from the action that ends then."""
    turns = []
    for worker in range(workers - 1):
        k = min(stages, workers - 1 - worker)
        lead = costs[k - 1].forward_s + costs[k - 1].backward_s
        path = [(Action(Op.F, s, worker), costs[s].forward_s) for s in range(stages)]
        path += [(Action(Op.B, s, worker), costs[s].backward_s) for s in reversed(range(stages))]
        time = 0.0
        for action, length in path:
            time += length
            if time >= lead - 1e-9:
                turns.append((action, Action(Op.F, 0, worker + 1)))
                break
    return turns
