"""One rank of a training run: its stages and units on a `RankRuntime`, and the checks before the first collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Op, walk
from meshwright.ir.analysis.held_values import late_units
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.ir.timeline import Timeline
from meshwright.passes.check import refuse_unproved
from meshwright.runtime.broadcast_tensor import broadcast_tensor
from meshwright.runtime.engine.rank_runtime import RankRuntime
from meshwright.runtime.engine.refuse_run import refuse_hooks_of, refuse_run, refuse_unequal
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.executor.executor import Executor
from meshwright.runtime.executor.train_actions import TrainActions
from meshwright.runtime.parameters.gradient_buffer import Adder, Collective
from meshwright.runtime.parameters.parameters import Parameters
from meshwright.runtime.parameters.unit import Unit
from meshwright.runtime.parameters.zero_shares import Shares
from meshwright.runtime.program import Program
from meshwright.runtime.stage.batch import Batch, Batches, Given, Own
from meshwright.runtime.stage.graphs_by_size import Graphs
from meshwright.runtime.stage.layers import Layers, refuse_stray, require_layers
from meshwright.runtime.stage.objective import Objective, Tally
from meshwright.runtime.stage.stage import Stage
from meshwright.runtime.tracing.clock_offset import common_clock
from meshwright.runtime.tracing.counted_run import RankCounts
from meshwright.runtime.tracing.trace import Trace, gather
from meshwright.runtime.transport.pair_sum import PairSum, pair_for


class Engine:
    """One rank of a run. Every rank creates it with equal arguments, inside an initialised process group.

    `segment` returns shorter schedules of the same run, by their number of rounds, if a walk may have fewer than `schedule`.
    `counts` counts what this rank sends.
    `program`, `parameters`, `actions` and `executor` are those of the last walk.
    """

    def __init__(
        self,
        schedule: Schedule,
        layers: Layers,
        settings: Settings,
        trace: Trace | None = None,
        segment: Callable[[int], Schedule] | None = None,
        counts: RankCounts | None = None,
    ) -> None:
        self._is_whole = schedule.flush and all(a.op is not Op.I for entries in schedule.lists for a in walk(entries))
        refuse_run(schedule, layers, settings)
        refuse_hooks_of(schedule, layers, whole=self._is_whole)
        refuse_unequal(schedule, layers, settings)
        self.schedule, self.layers, self.settings = schedule, layers, settings
        self.objective = Objective(settings.loss, weigh=layers.weigh, count=settings.count, kind=settings.loss_kind)
        self.scaler = settings.precision.scaler()
        self.runtime = RankRuntime(
            schedule,
            copies=settings.copies,
            box=settings.box,
            ranks=settings.ranks,
            transport=settings.transport,
            device=settings.device,
        )
        self.mesh, self.groups, self.transport = self.runtime.mesh, self.runtime.groups, self.runtime.transport
        self.program = self.runtime.program(schedule)
        if layers.tensor is not None:
            self.runtime.connect(layers.tensor.wires)
            layers.tensor.take_parts((p for unit in self.program.units for p in layers.unit(unit)), settings.device)
        self.stages = {stage: self._stage(stage) for stage in self.program.stages}
        self.graphs = Graphs(layers, self.stages, settings.device, versioned=not schedule.flush)
        self._start_equal()
        self.units = {unit: self._unit(unit) for unit in self.program.units}
        self.borrowed = {unit: self._unit(unit, owned=False) for unit in self.program.borrowed}
        self.unit_of = {p: unit for unit in self.units.values() for p in (*unit.params, *unit.divided_params)}
        used = {p for unit in self.used_units.values() for p in unit.params}
        self._others = [p for p in self.layers.names if p not in used and p.grad is None]
        self._trace, self._shorter, self._counts = trace, segment, counts
        self._walkers = {schedule.steps: self._walker(self.program)}
        self._choose(schedule.steps)
        if trace is not None:
            self._watch(trace)
        if counts is not None:
            self._count_sums(counts)

    @property
    def used_units(self) -> dict[int, Unit]:
        """All units that this rank's stages use: those that it holds, in `units`, and those that other ranks own."""
        return {**self.units, **self.borrowed}

    def _walker(self, program: Program) -> Executor:
        """Returns what walks a list with the stages and units of this rank."""
        layers, settings = {stage: at.layers for stage, at in self.stages.items()}, self.settings
        parameters = Parameters(
            program, self.mesh, self.used_units, layers, settings.rules, settings.device, self.scaler, settings.options
        )
        actions = TrainActions(program, self.stages, parameters, settings.microbatches, self.graphs)
        return self.runtime.executor(program, actions, self._trace, self._counts)

    def _choose(self, rounds: int) -> None:
        """Sets the number of rounds of the next walk. Their lists are built when they are first needed."""
        if rounds not in self._walkers:
            assert self._shorter is not None, f"{self.schedule.name} has {self.schedule.steps} rounds, not {rounds}"
            shorter = self._shorter(rounds)
            refuse_unproved(shorter)
            self._walkers[rounds] = self._walker(self.runtime.program(shorter))
        self.executor = self._walkers[rounds]
        assert isinstance(self.executor.actions, TrainActions)
        self.program, self.actions = self.executor.program, self.executor.actions
        self.parameters = self.actions.parameters

    def run(self, batch: Callable[[int], Given | Own], first_step: int = 0, rounds: int | None = None) -> dict[int, Tally]:
        """Walks the schedule once with the batches of its steps: one step, or several if its lists contain more microbatches.

        `rounds` walks a shorter segment of the same run.
        """
        self._choose(rounds or self.schedule.steps)
        refuse_hooks_of(self.schedule, self.layers, whole=self._is_whole)
        for unit in self.units.values():
            unit.take_over()
        kept = max(self.schedule.stages, self.schedule.steps)  # a walk reads the forms of all its batches first
        batches = Batches(lambda step: self._cut(batch(step)), kept)
        with nullcontext() if self._counts is None else self._counts.walking():
            if self.scaler is not None and not self.scaler.unit:
                self.scaler.measure(self._largest(batches[first_step].count))
            self.executor.run(first_step, batches)
        if sum(walker.walks for walker in self._walkers.values()) == 1:
            refuse_stray(self.layers, self._others)
        return self.actions.tallies if self.mesh.coordinate == 0 else {}  # all ranks of a box have the same losses

    def _cut(self, given: Given | Own) -> Batch:
        """Returns the batch of a step, cut for this data-parallel copy."""
        found = self.runtime.batch(given, microbatches=self.settings.microbatches, names=self.layers.columns)
        self.actions.flow.pieces.refuse_rows(found.cuts)
        self.graphs.choose(found)
        return found

    def timeline(self) -> Timeline | None:
        """Returns the traced timeline of all ranks on one clock, on rank 0, and None elsewhere. All ranks call this together."""
        if self.executor.trace is None:
            raise MeshwrightError("this run was not traced", fix="use Engine(..., trace=Trace()) on all ranks")
        return gather(self.executor.trace, self.program.schedule, self.mesh)

    @property
    def divides_parameters(self) -> bool:
        """Whether ranks do not keep whole parameters of their stages: they have parts of them, or other ranks own them."""
        divided = self.schedule.sharding is Sharding.PARAMETERS or bool(self.schedule.owners)
        return divided or self.layers.tensor is not None

    @contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Makes all parameters of this rank whole for a while. All ranks do this together."""
        with ExitStack() as stack:
            for unit in self.units.values():
                stack.enter_context(unit.whole(writes=writes))
            yield

    def make_whole(self) -> None:
        """Gathers parameters that are divided among ranks, for good. All ranks do this together, after training.

        Those of other owners only get memory.
        """
        for unit in self.units.values():
            if not unit.keeps_whole:
                unit.gather()
                unit.wait()
        for unit in self.borrowed.values():
            assert unit.borrowed is not None
            unit.borrowed.make_room()

    def _watch(self, trace: Trace) -> None:
        """Sets the clock of the trace, and lets it record the end of waits for syncs."""
        trace.clock = common_clock(self.settings.device)
        for number, unit in self.units.items():
            if unit.adder is not None:
                trace.watch(number)
                unit.landed = partial(trace.landed, number)

    def _count_sums(self, counts: RankCounts) -> None:
        """Counts the sums of two processes as collectives, and not what `Unit.watch` needs."""
        for number, unit in self.units.items():
            unit.show = counts.outside(unit.show)  # type: ignore[method-assign]
            if isinstance(unit.adder, PairSum):
                first = self.mesh.adding(self.schedule, number)[0] == self.mesh.rank
                unit.adder.start = counts.sums_of_two(unit.adder.start, first=first)  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Releases shared memory, channels and process groups."""
        for unit in self.units.values():
            if unit.adder is not None:
                unit.adder.close()
        self.runtime.close()

    def _stage(self, stage: int) -> Stage:
        schedule, layers = self.schedule, self.layers.of_stage(stage)
        share = schedule.recompute[stage].share if schedule.recompute else 0.0
        require_layers(layers, share, stage)
        return Stage(
            layers=[layer.to(self.settings.device) for layer in layers],
            first_layer=self.layers.starts[stage],
            device=self.settings.device,
            is_last=stage == schedule.stages - 1,
            objective=self.objective,
            seed=self.settings.seed,
            share=share,
            precision=self.settings.precision,
            scaler=self.scaler,
            is_captured=self.layers.columns is not None,
            splits=any(a.op is Op.I and a.stage == stage for a in walk(schedule.lists[self.mesh.worker])),
        )

    def _unit(self, unit: int, *, owned: bool = True) -> Unit:
        ranks = self.mesh.adding(self.schedule, unit)
        return Unit(
            self.layers.unit(unit),
            optimizer=self.settings.optimizer,
            scheduler=self.settings.scheduler,
            adder=partial(self._adder, unit, ranks) if ranks in self.groups else None,
            versioned=not self.schedule.flush,
            rounds=self.schedule.steps,
            first=self.schedule.first,
            late=unit in late_units(self.schedule, self.mesh.worker),
            tensor=self.layers.tensor,
            divided=None if self.schedule.sharding is Sharding.NONE else partial(self._shares, ranks),
            divides_frozen=self.schedule.sharding is Sharding.PARAMETERS,
            singly=self.schedule.sharding.sums_singly,
            pieces=self.settings.pieces,
            owned=owned,
        )

    def _shares(self, ranks: tuple[int, ...], params: Sequence[nn.Parameter]) -> Shares:
        """Returns how the holders of a unit divide it among them."""
        keeps = self.schedule.sharding is not Sharding.PARAMETERS
        return Shares(params, ranks, self.mesh.rank, self.groups.get(ranks), keeps_whole=keeps)

    def _adder(self, unit: int, ranks: tuple[int, ...], flats: Sequence[Tensor]) -> Adder:
        """Returns what sums a unit's gradients. Two ranks that share memory need no collective."""
        if self.schedule.sharding is not Sharding.NONE:
            return Collective(self.groups[ranks])
        return pair_for(flats, self.transport, ranks, self.mesh.rank, self.schedule, unit) or Collective(self.groups[ranks])

    def _largest(self, count: int) -> float:
        """Returns the maximum of a number over all ranks. All ranks call this together."""
        found = torch.tensor([float(count)], device=self.settings.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    def _start_equal(self) -> None:
        """Broadcasts the parameters of each unit from its first holder, so that equal starts do not depend on equal seeds."""
        for unit in range(self.schedule.units):
            ranks = self.mesh.holders(self.schedule, unit)
            if self.schedule.owners:  # others get trained parameters from the owner when they need them
                for parameter in (p for p in self.layers.unit(unit) if not p.requires_grad):
                    broadcast_tensor(parameter.data, src=ranks[0])
            group = self.groups.get(ranks)
            if group is not None and self.mesh.rank in ranks:
                for parameter in self.layers.unit(unit):
                    broadcast_tensor(parameter.data, src=ranks[0], group=group)
