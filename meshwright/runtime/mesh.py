"""Map ranks to workers, data-parallel copies and tensor coordinates, and create the process groups that sum gradients.

All groups are created at the start, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

import torch.distributed as dist

from meshwright.ir.action import Kind, Transfer
from meshwright.ir.analysis.reduction_groups import groups, holders
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.schedule import Schedule
from meshwright.passes.reduction_law import refuse_groups
from meshwright.runtime.transport.base import Channel


@dataclass(frozen=True)
class Mesh:
    """Where a rank is. This is the only place that computes with rank numbers.

    Seat w + workers * j is worker w of data-parallel copy j. A seat has `box` ranks, which share its tensors: place
    seat * box + c has coordinate c. Without tensor parallelism a seat is one place.

    `rank` counts the ranks of the process group, which has no idle ranks. `ranks` are the ranks that the places were given to,
    as processes were started; if it is empty, rank i runs place i. The process group keeps their order, so both numbers are
    the same if no rank is idle.
    """

    workers: int
    copies: int
    rank: int
    box: int = 1
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, parallel: Parallel, rank: int, workers: int) -> Mesh:
        """Returns the mesh of a plan on one rank of its process group. `workers` is the number of workers of its schedule."""
        return cls(workers, parallel.copies, rank, parallel.tp, parallel.ranks)

    @property
    def processes(self) -> int:
        """The number of ranks of a run."""
        return self.workers * self.copies * self.box

    @cached_property
    def _members(self) -> tuple[int, ...]:
        return tuple(sorted(self.ranks)) or tuple(range(self.processes))

    @cached_property
    def _rank_at(self) -> tuple[int, ...]:
        """The rank of each place."""
        order = {started: rank for rank, started in enumerate(self._members)}
        return tuple(order[started] for started in self.ranks or self._members)

    @cached_property
    def _place_of(self) -> tuple[int, ...]:
        """The place of each rank."""
        found = [0] * self.processes
        for place, rank in enumerate(self._rank_at):
            found[rank] = place
        return tuple(found)

    def started(self, rank: int) -> int:
        """Returns the number that the process of a rank was started with. Users know processes by this number."""
        return self._members[rank]

    @property
    def place(self) -> int:
        """The place of this rank."""
        return self._place_of[self.rank]

    @property
    def seat(self) -> int:
        """The seat of this rank."""
        return self.place // self.box

    @property
    def coordinate(self) -> int:
        """The position of this rank among the ranks of its seat."""
        return self.place % self.box

    @property
    def worker(self) -> int:
        """The worker index of this rank in its data-parallel copy."""
        return self.seat % self.workers

    @property
    def copy(self) -> int:
        """The data-parallel copy that this rank belongs to."""
        return self.seat // self.workers

    @property
    def is_first_worker(self) -> bool:
        """True on one rank of each data-parallel copy, which counts its rows."""
        return self.worker == 0 and self.coordinate == 0

    def seat_of(self, worker: int) -> int:
        """Returns the seat of a worker in the same data-parallel copy."""
        return worker + self.workers * self.copy

    def rank_of(self, worker: int) -> int:
        """Returns the rank of a worker in the same data-parallel copy, at the same coordinate."""
        return self._rank_at[self.seat_of(worker) * self.box + self.coordinate]

    def holders(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """Returns every rank that holds a unit's parameters at this rank's coordinate, over all data-parallel copies."""
        return self.together(holders(schedule, self.copies, unit), self.coordinate)

    def writers(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """Returns every rank that holds a unit's parameters or parts of them: all ranks of all its seats."""
        return tuple(rank for seat in holders(schedule, self.copies, unit) for rank in self.boxes[seat])

    @cached_property
    def boxes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each seat, by coordinate."""
        return tuple(self._rank_at[seat * self.box : (seat + 1) * self.box] for seat in range(self.workers * self.copies))

    def shares_seat(self, rank: int) -> bool:
        """Returns whether a rank belongs to the seat of this rank."""
        return self._place_of[rank] // self.box == self.seat

    def coordinate_of(self, rank: int) -> int:
        """Returns the coordinate of a rank."""
        return self._place_of[rank] % self.box

    def adding(self, schedule: Schedule, unit: int) -> tuple[int, ...]:
        """Returns the ranks that this rank sums a unit's gradients with; empty if it sums them with messages only."""
        found = next((seats for seats in groups(schedule, self.copies)[unit] if self.seat in seats), ())
        return self.together(found, self.coordinate)

    def at(self, seat: int, coordinate: int) -> Mesh:
        """Returns the mesh of the rank at a seat and a coordinate."""
        return replace(self, rank=self.boxes[seat][coordinate])

    def every_coordinate(self) -> Iterator[Mesh]:
        """Yields the ranks of this seat, as their own meshes."""
        for coordinate in range(self.box):
            yield self.at(self.seat, coordinate)

    def together(self, seats: Iterable[int], coordinate: int) -> tuple[int, ...]:
        """Returns the ranks of seats at one coordinate, in ascending order, as torch numbers the ranks of a group."""
        return tuple(sorted(self.boxes[seat][coordinate] for seat in seats))


def sync_groups(mesh: Mesh, schedule: Schedule) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Creates one group per set of ranks that sum gradients together or start with equal parameters, except sets of one rank.

    Raises before the first group is created if the groups break the reduction law.
    """
    refuse_groups(schedule, mesh.copies, groups(schedule, mesh.copies))
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(group_ranks(mesh, schedule)):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if mesh.rank in ranks:
                found[ranks] = group
    return found


def group_ranks(mesh: Mesh, schedule: Schedule) -> set[tuple[int, ...]]:
    """Returns the sets of ranks that sum gradients or start equal together, at every coordinate; the same on all ranks."""
    units = range(schedule.units)
    seats = {holders(schedule, mesh.copies, unit) for unit in units} | {of for g in groups(schedule, mesh.copies) for of in g}
    return {mesh.together(of, c) for of in seats for c in range(mesh.box)}


def channels(mesh: Mesh, schedule: Schedule) -> tuple[Channel, ...]:
    """Returns every channel of a run, in the same order on all ranks. Each coordinate has its own channels.

    If the workers of a stage change from round to round, sums take other ways in segments of other lengths. Then there are
    channels for all of them.
    """
    found = {
        (worker, entry.peer, entry.value.kind)
        for worker, entries in enumerate(schedule.lists)
        for entry in entries
        if isinstance(entry, Transfer) and entry.sends
    }
    counts = {len(teams) for replica in schedule.placement.teams for teams in replica}
    if schedule.ring and schedule.first and any(schedule.microbatches % count for count in counts):
        found |= {(a, b, Kind.SUM) for workers in schedule.holders for a, b in permutations(workers, 2)}
    ends = [mesh.at(mesh.workers * copy, c) for copy in range(mesh.copies) for c in range(mesh.box)]
    return tuple(Channel(at.rank_of(a), at.rank_of(b), kind) for at in ends for a, b, kind in sorted(found))
