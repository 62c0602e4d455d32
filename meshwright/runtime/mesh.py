"""Which rank is which worker of which copy, and the groups that add up gradients; made eagerly, in one order on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from meshwright.ir.analysis.reduction_groups import groups, holders
from meshwright.ir.schedule import Schedule
from meshwright.passes.reduction_law import refuse_groups


@dataclass(frozen=True)
class Mesh:
    """Rank w + workers * j is worker w of copy j."""

    workers: int
    copies: int
    rank: int

    @property
    def worker(self) -> int:
        """The worker that this rank is."""
        return self.rank % self.workers

    @property
    def copy(self) -> int:
        """The copy that this rank belongs to."""
        return self.rank // self.workers

    def rank_of(self, worker: int) -> int:
        """The rank of a worker of the same copy."""
        return worker + self.workers * self.copy

    def holders(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """Every rank that holds a unit's parameters, over all copies."""
        return holders(schedule, self.copies, unit)

    def adding(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """The ranks that this one adds up a unit's gradients with; empty where it does so by messages alone."""
        return next((ranks for ranks in groups(schedule, self.copies)[unit] if self.rank in ranks), ())


def sync_groups(mesh: Mesh, schedule: Schedule) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One group per set of ranks that add up or start equal together, proved first; a set of one needs none."""
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
