"""Which rank is which worker of which copy, and the groups that add up gradients; made eagerly, in one order on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from meshwright.ir.schedule import Schedule


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

    def siblings(self, worker: int) -> tuple[int, ...]:
        """The ranks that are this worker in their copies."""
        return tuple(worker + self.workers * j for j in range(self.copies))

    def holders(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """Every rank that holds a unit's parameters, over all copies."""
        return tuple(w + self.workers * j for j in range(self.copies) for w in schedule.holders[unit])


def sync_groups(mesh: Mesh, schedule: Schedule) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One group per set of ranks that add up together; a set of one needs none."""
    wanted = {mesh.holders(schedule, unit) for unit in range(schedule.units)}
    if schedule.ring:
        wanted |= {mesh.siblings(worker) for worker in range(mesh.workers)}
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(wanted):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if mesh.rank in ranks:
                found[ranks] = group
    return found
