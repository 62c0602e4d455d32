"""DualPipe (DeepSeek-V3): the two directions of Chimera, split backwards, and forwards that overlap backwards in cells.

It is DualPipeV unfolded: worker w of the V becomes workers w and D-1-w, with its shallow stage in one direction and its deep
stage in the other. The first half of the microbatches runs down (replica 0), the second half up (replica 1).
"""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule
from meshwright.schedules._orders.wave import unfold
from meshwright.schedules.dualpipev import folded_lists


def build(*, workers: int, microbatches: int) -> Schedule:
    """Needs an even number of workers and of microbatches; the bubble is the published one from 2D-2 microbatches on."""
    if workers % 2:
        raise MeshwrightError(f"dualpipe needs an even number of workers, got {workers}", fix=f"--workers {workers + 1}")
    if microbatches % 2:
        raise MeshwrightError(
            f"dualpipe runs half of the microbatches in each direction, got {microbatches}",
            fix=f"--microbatches {microbatches + 1}",
        )
    lists = unfold(folded_lists(workers // 2, microbatches // 2), microbatches, unit=microbatches)
    return Schedule("dualpipe", Placement.mirrored(workers), microbatches, tuple(map(tuple, lists)))
