"""Cyclic data parallelism (Fournier & Oyallon, 2403.08837): each worker runs whole microbatches, two time steps apart.

    1: F1 F2 F3 B3 B2 B1 F1 F2 ..        N = 3: from time step 4 on every stage is used by exactly one worker,
    2: .  .  F1 F2 F3 B3 B2 B1 ..        so the number of live activations is constant, N (N + 1) / 2, and gradients
    3: .  .  .  .  F1 F2 F3 B3 ..        are passed from worker to worker as running sums, without an all-reduce

Worker i of round t (1-based) reads version t of stage j if it exists in time, i + j >= K + 1 + margin, else version t - 1.
v2 has margin 0; v1 always reads t - 1. A worker updates its one copy of the parameters right before the forward that needs
the new version. Lists that continue a run (`first` > 0) start and end with both versions of the stages that a worker reads late.

This file has the rule. The lists of all forms are in `_orders/cyclic_forms.py` and `cyclic_owners.py`. The stagger is part of the
schedule, as turns (`_orders/cyclic_turns.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, rows_for
from meshwright.schedules._orders.cyclic_forms import placed, placement_of, side_by_side
from meshwright.schedules._orders.cyclic_owners import with_owners
from meshwright.schedules._orders.cyclic_turns import holds_turns, refuse_margin, refuse_sizes, staggered


def build(
    *,
    workers: int,
    microbatches: int,
    steps: int = 1,
    first: int = 0,
    costs: Sequence[StageCost] | None = None,
    rule: Literal["v1", "v2"] = "v2",
    margin: int | None = None,
    chunks: int | None = None,
    stagger: Literal["auto", "turns", "starts"] = "auto",
    form: Literal["replicated", "zero", "mp", "pp"] = "replicated",
) -> Schedule:
    """M workers, K = `chunks` <= M stages, one microbatch per worker and round; other forms have their own sizes."""
    refuse_margin(microbatches, rule, margin)
    placement = None if form in ("replicated", "zero") else placement_of(form, workers, microbatches, chunks)
    stages = placement.stages if placement else workers if chunks is None else chunks
    late = microbatches if rule == "v1" else margin or 0

    def fresh(worker: int, stage: int) -> bool:
        return (worker + 1) + (stage + 1) >= stages + 1 + late

    def version(worker: int, stage: int, round_: int) -> int:
        return round_ if fresh(worker, stage) else max(0, round_ - 1)

    if placement is not None:
        return placed(
            placement,
            microbatches=microbatches,
            rounds=range(first, first + steps),
            version=lambda mb, stage: version(mb % microbatches, stage, mb // microbatches),
            turns=holds_turns(stagger, rows_for(costs, stages)),
        )
    refuse_sizes(workers, microbatches, stages)
    turns = staggered(stagger, workers, stages, rows_for(costs, stages), range(first, first + min(steps, 2) + 2))
    found = side_by_side(workers, stages, range(first, first + steps), version, turns)
    return with_owners(found, rule, margin) if form == "zero" else found
