"""The stagger of cyclic data parallelism, as control edges (writer, reader). Without them all workers would run in lockstep.

A `turn` passes stage j from F(m) to B(m - (K - j)) to F(m + 1). With unequal stages, only the turns that delay the starts of the
first round are kept, by the lead that the v2 rule needs. Leads are rounded up to whole actions, so round 1 stalls once on a
worker (mostly for less than a third of a round), and later rounds do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Op
from meshwright.ir.stage_cost import StageCost

Turn = tuple[Action, Action]
UNEVEN = 1.001
"""Stages whose times differ by more than this ratio are not equal."""


def staggered(how: str, workers: int, stages: int, costs: Sequence[StageCost], rounds: range) -> list[Turn]:
    """Returns turns that hold the stagger exactly, or only the delayed starts; `auto` means turns if stages are equal."""
    even = holds_turns(how, costs)
    found = even_turns(stages, range(len(rounds) * workers)) if even else start_turns(workers, stages, costs)
    start = rounds.start * workers
    return [(writer.shifted(start, 0), reader.shifted(start, 0)) for writer, reader in found]


def holds_turns(how: str, costs: Sequence[StageCost]) -> bool:
    """Returns whether turns hold the stagger exactly; `auto` means that they do if stages are equal."""
    times = [cost.forward_s + cost.backward_s for cost in costs]
    return max(times) <= UNEVEN * min(times) if how == "auto" else how == "turns"


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


def refuse_sizes(workers: int, microbatches: int, stages: int) -> None:
    """Raises if a replicated cyclic schedule of these sizes is not possible."""
    if microbatches != workers:
        raise MeshwrightError(
            f"cyclic runs one microbatch per worker and round: {workers} workers, got {microbatches} microbatches",
            fix=f"--microbatches {workers}",
        )
    if not 1 <= stages <= workers:
        raise MeshwrightError(f"cyclic needs 1 to {workers} stages for {workers} workers, got {stages}", fix=f"chunks={workers}")


def refuse_margin(microbatches: int, rule: str, margin: int | None) -> None:
    """Raises if the rule cannot have this margin."""
    if margin is not None and not 0 <= margin <= microbatches:
        raise MeshwrightError(f"cyclic: margin must be 0 to {microbatches}, got {margin}", fix="margin=0")
    if margin is not None and rule == "v1":
        raise MeshwrightError("cyclic: margin needs rule=v2; v1 has the largest margin", fix="rule=v2")
