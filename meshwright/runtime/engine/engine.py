"""One rank of a training run: its stages and units on a `RankRuntime`, and the checks before the first collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Op, walk
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Timeline
from meshwright.passes.check import refuse_unproved
from meshwright.runtime.engine.rank_runtime import RankRuntime
from meshwright.runtime.executor.train_actions import TrainActions
from meshwright.runtime.json_exchange import all_gather_json
from meshwright.runtime.parameters.parameters import Parameters, Rules, refuse_rules
from meshwright.runtime.parameters.unit import Adder, Collective, Optimizer, Scheduler, Unit
from meshwright.runtime.stage.batch import Batch, Batches, Given, Own
from meshwright.runtime.stage.cpu_formats import require
from meshwright.runtime.stage.graphs_by_size import Graphs
from meshwright.runtime.stage.layers import Layers, refuse_hooks, refuse_stray, refuse_tied_hooks, require_layers
from meshwright.runtime.stage.objective import Count, Loss, LossKind, Objective, Tally
from meshwright.runtime.stage.precision import Precision, refuse
from meshwright.runtime.stage.stage import Stage
from meshwright.runtime.tracing.clock_offset import common_clock
from meshwright.runtime.tracing.trace import Trace, gather
from meshwright.runtime.transport.pair_sum import pair_for


@dataclass(frozen=True)
class Settings:
    """How to run a schedule. `microbatches` is per step and data-parallel copy."""

    optimizer: Optimizer
    microbatches: int
    copies: int = 1
    box: int = 1
    """Ranks that share the tensors of a worker."""
    scheduler: Scheduler | None = None
    loss: Loss | None = None
    count: Count | None = None
    loss_kind: LossKind = LossKind.MEAN
    rules: Rules = field(default_factory=Rules)
    transport: str = "auto"
    seed: int = 0
    precision: Precision = field(default_factory=Precision)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


EQUAL = ("microbatches", "copies", "box", "loss_kind", "rules", "transport", "seed", "precision")
"""The settings that must be the same on all ranks."""


class Engine:
    """One rank of a run. Every rank creates it with equal arguments, inside an initialised process group."""

    def __init__(self, schedule: Schedule, layers: Layers, settings: Settings, trace: Trace | None = None) -> None:
        self._is_whole = schedule.flush and all(a.op is not Op.I for entries in schedule.lists for a in walk(entries))
        _refuse(schedule, layers, settings)
        _refuse_hooks(schedule, layers, whole=self._is_whole)
        _refuse_unequal(schedule, layers, settings)
        self.schedule, self.layers, self.settings = schedule, layers, settings
        self.objective = Objective(settings.loss, weigh=layers.weigh, count=settings.count, kind=settings.loss_kind)
        self.scaler = settings.precision.scaler()
        self.runtime = RankRuntime(
            schedule, copies=settings.copies, box=settings.box, transport=settings.transport, device=settings.device
        )
        if layers.tensor is not None:
            self.runtime.connect(layers.tensor.wires)
        self.mesh, self.groups, self.transport = self.runtime.mesh, self.runtime.groups, self.runtime.transport
        self.program = self.runtime.program(schedule)
        self.stages = {stage: self._stage(stage) for stage in self.program.stages}
        self.graphs = Graphs(layers, self.stages, settings.device, versioned=not schedule.flush)
        self._start_equal()
        self.units = {unit: self._unit(unit) for unit in self.program.units}
        mine = {p for unit in self.units.values() for p in unit.params}
        self._others = [p for p in self.layers.names if p not in mine and p.grad is None]
        layers_here = {stage: at.layers for stage, at in self.stages.items()}
        self.parameters = Parameters(
            self.program, self.mesh, self.units, layers_here, settings.rules, settings.device, self.scaler
        )
        self.actions = TrainActions(self.program, self.stages, self.parameters, settings.microbatches, self.graphs)
        self.executor = self.runtime.executor(self.program, self.actions, trace)
        if trace is not None:
            self._watch(trace)

    def run(self, batch: Callable[[int], Given | Own], first_step: int = 0) -> dict[int, Tally]:
        """Walks the schedule once with the batches of its steps: one step, or several if its lists contain more microbatches."""
        _refuse_hooks(self.schedule, self.layers, whole=self._is_whole)
        kept = max(self.schedule.stages, self.schedule.steps)  # a walk reads the forms of all its batches first
        batches = Batches(lambda step: self._cut(batch(step)), kept)
        if self.scaler is not None and not self.scaler.unit:
            self.scaler.measure(self._largest(batches[first_step].count))
        self.executor.run(first_step, batches)
        if self.executor.walks == 1:
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
        return gather(self.executor.trace, self.schedule, self.mesh)

    def _watch(self, trace: Trace) -> None:
        """Sets the clock of the trace, and lets it record the end of waits for syncs."""
        trace.clock = common_clock(self.settings.device)
        for number, unit in self.units.items():
            if unit.adder is not None:
                trace.watch(number)
                unit.landed = partial(trace.landed, number)

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
            splits=any(a.op is Op.I and a.stage == stage for a in walk(schedule.lists[self.mesh.worker])),
        )

    def _unit(self, unit: int) -> Unit:
        ranks = self.mesh.adding(self.schedule, unit)
        return Unit(
            self.layers.unit(unit),
            optimizer=self.settings.optimizer,
            scheduler=self.settings.scheduler,
            adder=partial(self._adder, unit, ranks) if ranks in self.groups else None,
            versioned=not self.schedule.flush,
            rounds=self.schedule.steps,
            tensor=self.layers.tensor,
        )

    def _adder(self, unit: int, ranks: tuple[int, ...], flats: Sequence[Tensor]) -> Adder:
        """Returns what sums a unit's gradients. Two ranks that share memory need no collective."""
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
            group = self.groups.get(ranks)
            if group is not None and self.mesh.rank in ranks:
                for parameter in self.layers.unit(unit):
                    dist.broadcast(parameter.data, src=ranks[0], group=group)


def _refuse(schedule: Schedule, layers: Layers, settings: Settings) -> None:
    """Raises if the run is not possible: before the first collective, and on all ranks alike."""
    world = dist.get_world_size()
    needed = schedule.workers * settings.copies * settings.box
    if world != needed:
        raise MeshwrightError(
            f"{schedule.name} needs {schedule.workers} workers x {settings.copies} copies = {needed} ranks, got {world}",
            fix=f"torchrun --nproc-per-node {needed}",
        )
    if layers.stages != schedule.stages:
        raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, but the model is cut into {layers.stages}")
    if layers.ties != schedule.ties:
        raise MeshwrightError(f"the model ties stages {layers.ties}, but the schedule was lowered for ties {schedule.ties}")
    if not schedule.lowered:
        raise MeshwrightError(f"{schedule.name} has no sends and receives yet", fix="meshwright.lower(schedule)")
    refuse_unproved(schedule)
    refuse(settings.precision, {name: p.dtype for p, name in layers.names.items()}, norm=schedule.norm, name=schedule.name)
    require(settings.precision.dtype, settings.device)
    refuse_rules(settings.rules, schedule)
    _refuse_microbatches(schedule, settings.microbatches)


def _refuse_hooks(schedule: Schedule, layers: Layers, *, whole: bool) -> None:
    """Raises if the schedule would not call a gradient hook, or not with a whole gradient. Also called before every walk."""
    if not whole:
        why = f"{schedule.name} computes on versions of the parameters, or splits weight gradients from input gradients"
        refuse_hooks(layers, why, fix="use a schedule with a flush and whole backwards, such as onef1b, or remove the hook")
    refuse_tied_hooks(layers)


def _refuse_microbatches(schedule: Schedule, found: int) -> None:
    """Raises if rounds and steps of data do not fit.

    Lists with only a part of a step would lose its other rows. A round over two steps would use rows twice.
    """
    count, rounds = schedule.microbatches, schedule.steps
    if type(found) is not int or found < 1 or found % count or count * rounds % found:
        fits = [count * k for k in range(1, rounds + 1) if not rounds % k]
        raise MeshwrightError(
            f"{schedule.name} has {rounds} rounds of {count} microbatches, but a step of data has {found!r}: a step must contain "
            f"whole rounds, and the lists must contain whole steps",
            fix=" or ".join(f"microbatches={fit}" for fit in sorted({fits[0], fits[-1]})),
        )


def _refuse_unequal(schedule: Schedule, layers: Layers, settings: Settings) -> None:
    """Raises if ranks have different arguments: they would exchange wrong data, or wait forever. This is compared first."""
    mine = {
        "cut the model in different ways": layers.digest,
        "have different schedules": f"{schedule.name} {schedule.digest[:16]}",
    } | {f"have different settings, {name}": repr(getattr(settings, name)) for name in EQUAL}
    found: list[dict[str, str]] = all_gather_json(mine)
    for what in mine:
        if other := [rank for rank, words in enumerate(found) if words[what] != found[0][what]]:
            raise MeshwrightError(
                f"ranks {what}: rank 0 has {found[0][what]}, rank {other[0]} has {found[other[0]][what]}",
                fix="use the same model, example batch, plan, settings and version of torch on all ranks",
            )
