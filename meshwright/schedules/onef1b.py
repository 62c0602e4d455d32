"""1F1B (DAPPLE, PipeDream-flush): alternate forward and backward as soon as a backward can run.

    0: F0 F1 F2 .  .  .  .  B0 =  .  B1 =  .  B2 =
    1: .  F0 F1 .  .  B0 =  F2 B1 =  .  B2 =  .  .
    2: .  .  F0 B0 =  F1 B1 =  F2 B2 =  .  .  .  .

More forwards at the start hide slow transfers, if neighbours agree on their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Op
from meshwright.ir.cluster import Cluster
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, hop_s, rows_for


def build(
    *,
    workers: int,
    microbatches: int,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
    warmup: Literal[1, 2, 4] = 1,
    memory: int | None = None,
) -> Schedule:
    """Runs `warmup` times the usual forwards before the first backward; or with `memory`, as many as help under that cap."""
    if memory is not None and warmup > 1:
        raise MeshwrightError(
            f"onef1b: memory={memory} chooses the warm-up itself, but warmup={warmup} is given", fix="give only one of the two"
        )
    if memory is None:
        lists = tuple(one_f_one_b(stage, microbatches, warmup * (workers - 1 - stage)) for stage in range(workers))
    else:
        lists = _within(memory, workers, microbatches, costs, cluster)
    return Schedule("onef1b", Placement.line(workers), microbatches, lists)


def one_f_one_b(stage: int, microbatches: int, warm: int) -> tuple[Action, ...]:
    """Returns `warm` forwards, then alternating forwards and backwards, then the remaining backwards."""
    warm = min(warm, microbatches)
    forwards = [Action(Op.F, stage, mb) for mb in range(microbatches)]
    backwards = [Action(Op.B, stage, mb) for mb in range(microbatches)]
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return (*forwards[:warm], *steady, *backwards[microbatches - warm :])


def _within(
    memory: int, workers: int, microbatches: int, costs: Sequence[StageCost] | None, cluster: Cluster | None
) -> tuple[tuple[Action, ...], ...]:
    """Chooses a consistent extra warm-up from costs and latency, under a cap."""
    from meshwright.schedules._orders.order_search import search
    from meshwright.schedules._orders.order_strings import Chain, actions_of, caps

    if memory < 1:
        raise MeshwrightError(f"onef1b needs memory for at least one activation, got memory={memory}", fix=f"memory={workers}")
    costs = rows_for(costs, workers)
    chain = Chain.of(costs, microbatches, hop_s(costs, cluster))
    return actions_of(search(chain, caps(memory, chain)))
