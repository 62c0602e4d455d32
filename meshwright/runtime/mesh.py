"""Map ranks to workers and data-parallel copies, and create the process groups that sum gradients.

All groups are created at the start, in the same order on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from meshwright.ir.analysis.reduction_groups import groups, holders
from meshwright.ir.schedule import Schedule
from meshwright.passes.reduction_law import refuse_groups


@dataclass(frozen=True)
class Mesh:
    """Rank w + workers * j is worker w of data-parallel copy j."""

    workers: int
    copies: int
    rank: int

    @property
    def worker(self) -> int:
        """The worker index of this rank in its data-parallel copy."""
        return self.rank % self.workers

    @property
    def copy(self) -> int:
        """The data-parallel copy that this rank belongs to."""
        return self.rank // self.workers

    def rank_of(self, worker: int) -> int:
        """Returns the rank of a worker in the same data-parallel copy."""
        return worker + self.workers * self.copy

    def holders(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """Returns every rank that holds a unit's parameters, over all data-parallel copies."""
        return holders(schedule, self.copies, unit)

    def adding(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """Returns the ranks that this rank sums a unit's gradients with; empty if it sums them with messages only."""
        return next((ranks for ranks in groups(schedule, self.copies)[unit] if self.rank in ranks), ())


def sync_groups(mesh: Mesh, schedule: Schedule) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Creates one group per set of ranks that sum gradients together or start with equal parameters, except sets of one rank.

    Raises before the first group is created if the groups break the reduction law.
    """
    adding = groups(schedule, mesh.copies)
    refuse_groups(schedule, mesh.copies, adding)
    wanted = {mesh.holders(schedule, unit) for unit in range(schedule.units)} | {ranks for of in adding for ranks in of}
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(wanted):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if mesh.rank in ranks:
                found[ranks] = group
    return found
