"""Which rows of a data source a rank loads, by the mode of its data-parallel copies."""

from __future__ import annotations

from dataclasses import replace

from meshwright.ir.plan.plan_dp import DpMode
from meshwright.ir.schedule import Schedule
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.stage.batch import Own
from meshwright.train.data.batches import Source
from meshwright.train.data.own_microbatches import microbatches_of


def source_of_rank(
    source: Source, mode: DpMode, *, dp: int, mesh: Mesh, schedule: Schedule, needed: frozenset[str] | None
) -> Source:
    """Returns a source limited to the rows that a rank runs, and to the columns that its stages need."""
    source = replace(source, needed=needed)
    if mode is DpMode.CYCLIC_PP:  # every rank runs all microbatches
        return source
    if mode is DpMode.CYCLIC_MP:
        return replace(source, copies=dp, several=microbatches_of(schedule, mesh.worker))
    if mode.is_cyclic:
        return replace(source, copy=mesh.worker, copies=dp, microbatch=mesh.worker)
    return replace(source, copy=mesh.copy, copies=dp)


def own_of_rank(batch: Own, mode: DpMode, mesh: Mesh) -> Own:
    """Returns the own rows of a rank. Under `cyclic` they are one microbatch; other modes leave them as they are."""
    alone = mode.is_cyclic and not mode.has_stage_workers
    return replace(batch, microbatch=mesh.worker) if alone else batch


def counts_rows(mode: DpMode, mesh: Mesh) -> bool:
    """True on one rank for all rows that a data-parallel copy loads, so that each row is counted once."""
    if mode.has_stage_workers:  # the last stage has one worker, which runs all microbatches
        return mesh.worker == mesh.workers - 1
    return mesh.coordinate == 0 if mode.is_cyclic else mesh.is_first_worker
