"""`RankRuntime`: the mesh position, process groups, transport and program of a rank.

Training, evaluation and emulation differ in their schedules and in what an action does. Everything else is set up here, once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.ir.schedule import Schedule
from meshwright.runtime.executor.actions import Actions
from meshwright.runtime.executor.executor import Executor
from meshwright.runtime.mesh import Mesh, channels, sync_groups
from meshwright.runtime.program import Program, program
from meshwright.runtime.stage.batch import Batch, Given, Own
from meshwright.runtime.tracing.counted_run import RankCounts
from meshwright.runtime.tracing.trace import Trace
from meshwright.runtime.transport.base import Transport
from meshwright.runtime.transport.choose import open_transport
from meshwright.runtime.transport.send_receive import Edges
from meshwright.tensor.wires.group_wires import Groups, GroupWires, make_groups
from meshwright.tensor.wires.wires import Wires

CPU = torch.device("cpu")


class RankRuntime:
    """Mesh, groups and transport of one rank. Every rank creates it with equal arguments, inside an initialised process group."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        copies: int = 1,
        box: int = 1,
        ranks: tuple[int, ...] = (),
        transport: str = "auto",
        device: torch.device = CPU,
        timeout_s: float | None = None,
        wrap: Callable[[Transport], Transport] | None = None,
    ) -> None:
        """`ranks` is that of the plan. `timeout_s` limits every wait for a message. `wrap` may wrap the opened transport."""
        self.mesh = Mesh(schedule.workers, copies, dist.get_rank(), box, ranks)
        self.device = device
        self.groups = sync_groups(self.mesh, schedule)
        self.channels = channels(self.mesh, schedule)
        self._opened = open_transport(transport, self.channels, self.mesh.rank, device=device)
        self._opened.timeout_s = timeout_s
        self._box_groups: Groups = {}
        self.transport = self._opened if wrap is None else wrap(self._opened)

    def program(self, schedule: Schedule) -> Program:
        """Compiles this rank's list of a schedule: the schedule of this runtime, or one that uses only its channels."""
        assert set(channels(self.mesh, schedule)) <= set(self.channels), "a message without a channel"
        found = program(schedule, self.mesh.worker, self.mesh.rank_of)
        if self.mesh.ranks:  # the rank alone does not tell the parent which worker died
            for instruction in found.instructions:
                instruction.words += f"@{self.mesh.seat}".encode()
        return found

    def executor(
        self, walked: Program, actions: Actions, trace: Trace | None = None, counts: RankCounts | None = None
    ) -> Executor:
        """Returns the executor that walks a program over this rank's transport."""
        arrived, sent = None if trace is None else trace.arrived, None if counts is None else counts.sent
        found = Executor(walked, Edges(self.transport, self.device, arrived, sent), actions, trace)
        found.worker = self.mesh.seat if self.mesh.ranks else None
        return found

    def holder_groups(self, schedule: Schedule) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Returns the process groups that sum gradients, by the workers of a copy that hold a unit."""
        found = {workers: self.groups.get(self.mesh.holders(schedule, unit)) for unit, workers in enumerate(schedule.holders)}
        return {workers: group for workers, group in found.items() if group is not None}

    def batch(self, given: Given | Own, *, microbatches: int, names: tuple[str, ...] | None) -> Batch:
        """Returns the batch of a step, cut into the microbatches of this rank's data-parallel copy."""
        mesh = self.mesh
        return Batch(given, microbatches=microbatches, copy=mesh.copy, copies=mesh.copies, device=self.device, names=names)

    def connect(self, wires: Wires) -> None:
        """Makes the process groups of all boxes, in one order on all ranks, and gives this rank's groups to its wires."""
        assert isinstance(wires, GroupWires), "ranks of a run talk over process groups"
        self._box_groups = make_groups(wires.grid, self.mesh.boxes, self.mesh.rank)
        wires.connect(self._box_groups)

    def close(self) -> None:
        """Releases channels and process groups."""
        self._opened.close()
        for group in (*self.groups.values(), *self._box_groups.values()):
            dist.destroy_process_group(group)
