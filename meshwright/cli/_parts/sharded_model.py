"""`inspect` with tensor flags: the shards and collectives of a named model under a tensor mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.cli._parts.mode_flags import ModeFlags
from meshwright.costs.planned_grid import planned_grid, planned_scheme
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel

if TYPE_CHECKING:
    from meshwright.train.models.named_layers import NamedGraph


@dataclass(frozen=True)
class ShardedText:
    """The report as JSON values and as text."""

    data: dict[str, Any]
    text: str


def sharded(flags: ModeFlags, named: NamedGraph | None, stages: int, cuts: Sequence[str] | None) -> ShardedText | None:
    """Returns what a mode does to a model; None if no mode is asked for.

    Raises:
        MeshwrightError: The mode cannot run the model: a size does not divide, or an operation has no rule.
    """
    plan = Parallel.of(flags.plan_fields())
    grid = planned_grid(plan)
    if grid is None:
        return None
    if named is None:
        raise MeshwrightError("a file with layers cannot be sharded: it has no operations", fix="pass the model itself")
    from meshwright.capture.shard.rank_memory import rank_memory
    from meshwright.capture.shard.shard_report import shard_data, shard_report
    from meshwright.capture.shard.sharded import TensorCut, shard_plan
    from meshwright.capture.split import choose_cuts

    tensor = TensorCut(grid, planned_scheme(plan, grid), plan.replicate, plan.overlap)
    places = choose_cuts(named.model, named.flat, stages, at=cuts).places
    settled = shard_plan(named.model, named.flat, tensor, named.shapes, places=places).settled
    memory = rank_memory(settled, named.model)
    return ShardedText(shard_data(settled, memory), "\n".join(shard_report(settled, memory)))
