"""Cyclic data parallelism (Fournier & Oyallon, 2403.08837): each worker runs whole microbatches, two time steps apart.

    1: F1 F2 F3 B3 B2 B1 F1 F2 ..        N = 3: from time step 4 on every stage is used by exactly one worker,
    2: .  .  F1 F2 F3 B3 B2 B1 ..        so the number of live activations is constant, N (N + 1) / 2, and gradients
    3: .  .  .  .  F1 F2 F3 B3 ..        are passed from worker to worker as running sums, without an all-reduce

Worker i of round t (1-based) reads version t of stage j if it exists in time, i + j >= K + 1 + margin, else version t - 1.
v2 has margin 0; v1 always reads t - 1. A worker updates its one copy of the parameters right before the forward that needs
the new version. Lists that continue a run (`first` > 0) start and end with both versions of the stages that a worker reads late.

The stagger is part of the schedule: a `turn` passes stage j from F(m) to B(m - (K - j)) to F(m + 1). With unequal stages, only
the turns that delay the starts of the first round are kept, by the lead that the v2 rule needs. Leads are rounded up to whole
actions, so round 1 stalls once on a worker (mostly for less than a third of a round), and later rounds do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.profile import StageCost, rows_for
from meshwright.ir.schedule import Schedule
from meshwright.schedules._orders.cyclic_owners import refuse_form, with_owners
from meshwright.schedules._orders.cyclic_turns import refuse_sizes, staggered


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
    form: Literal["replicated", "zero"] = "replicated",
) -> Schedule:
    """M workers, K = `chunks` <= M stages, one microbatch per worker and round."""
    stages = workers if chunks is None else chunks
    refuse_sizes(workers, microbatches, stages, rule, margin)
    if form == "zero":
        refuse_form(rule, margin, workers, stages)
    margin = workers if rule == "v1" else margin or 0

    def fresh(worker: int, stage: int) -> bool:
        return (worker + 1) + (stage + 1) >= stages + 1 + margin

    def version(worker: int, stage: int, round_: int) -> int:
        return round_ if fresh(worker, stage) else max(0, round_ - 1)

    def round_list(worker: int, round_: int) -> list[Action]:
        mb, entries = workers * round_ + worker, []
        for stage in range(stages):
            wanted = version(worker, stage, round_)
            if wanted > first and wanted > version(worker, stage, round_ - 1):
                entries.append(Action(Op.U, stage, version=wanted - 1))
            entries.append(Action(Op.F, stage, mb, version=wanted))
        return entries + [Action(Op.B, s, mb, version=version(worker, s, round_)) for s in reversed(range(stages))]

    def updates_left(worker: int, end: int) -> list[Action]:
        return [
            Action(Op.U, s, version=k)
            for k in range(first, end)
            for s in reversed(range(stages))
            if k >= version(worker, s, end - 1)
        ]

    settled = first + min(steps, 2)
    prologue = [[a for t in range(first, settled) for a in round_list(w, t)] for w in range(workers)]
    exact = {(a.op, a.stage, a.mb): a for w in range(workers) for t in range(first, settled + 2) for a in round_list(w, t)}
    turns = staggered(stagger, workers, stages, rows_for(costs, stages), range(first, settled + 2))
    edges = [(exact[a.op, a.stage, a.mb], exact[b.op, b.stage, b.mb]) for a, b in turns]
    found = Schedule(
        "cyclic",
        Placement(((tuple((worker,) for worker in range(workers)),) * stages,)),
        workers,
        period=tuple(tuple(round_list(w, first + 2)) for w in range(workers)) if settled == first + 2 else (),
        prologue=tuple(map(tuple, prologue)),
        drain=tuple(tuple(updates_left(w, settled)) for w in range(workers)),
        repeats=steps - min(steps, 2),
        turns=tuple(edge for edge in edges if edge[1].mb < (first + 3) * workers),
        flush=False,
        ring=True,
        first=first,
    )
    return with_owners(found) if form == "zero" else found
