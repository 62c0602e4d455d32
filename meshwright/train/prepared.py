"""A prepared run: all decisions that are made once, before ranks start.

    run = prepare(RunRequest(model, example, plan))     captures, checks, cuts, measures, builds, lowers and proves
    layers = run.open(model)                            on every rank: the stages of its own copy of the model

`Trainer`, `parallelize`, `verify` and the command line all prepare a run this way. A `PreparedRun` holds no weights and can be
pickled, so local workers receive it. Under torchrun every rank prepares it from equal inputs, and the engine compares digests
of the schedule, the graph and the cuts before the first message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.capture.weights.sketch import Skeleton
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.runtime.engine.evaluate import forward_schedule
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.parameters.unit import Pieces, Scheduler, UnitOptimizer
from meshwright.runtime.stage.batch import Batch, Given
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import Count, Loss, LossKind, Objective
from meshwright.runtime.stage.precision import Precision
from meshwright.train.data.step_rows import microbatch_sizes
from meshwright.train.data.vocabulary import Vocabulary, refuse_ids, vocabularies
from meshwright.train.setup.build_schedule import (
    SEGMENT,
    explaining_chunks,
    lists_for,
    refuse_cyclic_precision,
    refuse_without_flush,
    stages_of,
    stages_to_train,
)
from meshwright.train.setup.captured_layers import CutGraph, cut_graph, is_captured, listed_layers
from meshwright.train.setup.check_capture import Evaluation, Start, check_start
from meshwright.train.setup.own_weights import fill_small_buffers
from meshwright.train.setup.saved_bytes import KeptBytes, saved_bytes
from meshwright.train.setup.sharded_layers import ShardedGraph, refuse_unsharded, refuse_versions, shard_graph, tensor_cut

Phase = Callable[[str], AbstractContextManager[None]]
"""Returns a context for a phase of the preparation: capture, cut, check or schedule."""


@dataclass(frozen=True)
class RunRequest:
    """The inputs of a run."""

    model: Any
    """A module, a list of layers, or a sketch."""
    example: Given
    parallel: Parallel
    loss: Loss | None = None
    """The user's loss function, if any."""
    count: Count | None = None
    loss_kind: LossKind = LossKind.MEAN
    precision: Precision = field(default_factory=Precision)
    weights: str | Path | None = None
    """Files with the weights of a sketch."""
    steps: int | None = None
    """The number of steps in the schedule. None means one step that is repeated, which needs a flush."""
    one_microbatch: bool = False
    """Whether the example is one microbatch instead of a whole batch."""
    step_rows: tuple[int, ...] = ()
    """The numbers of rows that steps have, over all data-parallel copies; that of the example if not given."""
    more_rows: Given | None = None
    """An example with more rows, to check the loss with."""
    check_capture: bool = True
    stages: int | None = None
    """The number of stages, if it is known already: schedules whose order is searched take time to build."""

    @property
    def module(self) -> Any:
        """The model itself. A sketch has a model without weights."""
        return self.model.model if isinstance(self.model, Skeleton) else self.model


@dataclass(frozen=True)
class PreparedRun:
    """A plan, its proved schedule, the traced graph with its cuts, and the bytes that stages keep in memory."""

    parallel: Parallel
    schedule: Schedule
    """The lowered and proved schedule."""
    forwards: Schedule | None
    """The schedule with only its forwards, for evaluation. None if the schedule has no flush."""
    graph: CutGraph | None
    """The traced graph and its cuts. None for a list of layers, which is not captured."""
    kept: tuple[KeptBytes, ...] | None = None
    """The bytes that each stage keeps for a microbatch, if recompute is chosen from a memory budget."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    sharded: ShardedGraph | None = None
    """The graph under a tensor mode; None if every parameter is whole."""
    loss: Loss | None = None
    count: Count | None = None
    loss_kind: LossKind = LossKind.MEAN
    precision: Precision = field(default_factory=Precision)
    costs: tuple[StageCost, ...] | None = None
    """The costs of the stages that shaped the schedule, if they are known."""

    @property
    def is_segmented(self) -> bool:
        """Whether training runs in segments of several steps, because the schedule has no flush."""
        return self.schedule.first > 0

    def segment(self, rounds: int) -> Schedule:
        """Returns the proved schedule of a segment of this many steps, at most as many as `schedule` has."""
        if rounds == self.schedule.steps:
            return self.schedule
        plan, ties, first = self.parallel, self.schedule.ties, self.schedule.first
        return lists_for(plan, ties=ties, steps=rounds, first=first, kept=self.kept, costs=self.costs)

    @property
    def flat(self) -> Flat | None:
        """The traced graph of a captured model."""
        return None if self.graph is None else self.graph.flat

    @property
    def vocabularies(self) -> tuple[Vocabulary, ...]:
        """The ids that the embeddings of a captured model accept."""
        return vocabularies(self.flat)

    def open(self, model: Any, mesh: Mesh | None = None) -> Layers:
        """Returns the stages of this rank's own copy of the model. Nothing is chosen here, so all ranks get the same.

        With a mesh, they run on the parts of this rank's tensor coordinate. The engine replaces whole parameters by these parts.
        """
        if self.graph is None:
            return listed_layers(model, self.schedule.stages, self.parallel.stages)
        if self.sharded is None or mesh is None:
            return self.graph.open(model)
        return self.sharded.open(model, self.graph, mesh.coordinate)

    def held(self, layers: Layers, mesh: Mesh) -> list[nn.Module]:
        """Returns the layers of the stages that this rank holds."""
        stages = sorted({stage for _, stage in self.schedule.placement.held[mesh.worker]})
        return [layer for stage in stages for layer in layers.of_stage(stage)]

    def mesh(self, rank: int) -> Mesh:
        """Returns the place of a rank in this run."""
        return Mesh.of(self.parallel, rank, self.schedule.workers)

    def settings(
        self,
        *,
        optimizer: UnitOptimizer,
        scheduler: Scheduler | None = None,
        rules: Rules | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        pieces: Pieces | None = None,
    ) -> Settings:
        """Returns the settings with which an engine trains this run."""
        plan = self.parallel
        return Settings(
            optimizer=optimizer,
            microbatches=plan.microbatches,
            copies=plan.copies,
            box=plan.tp,
            ranks=plan.ranks,
            scheduler=scheduler,
            loss=self.loss,
            count=self.count,
            loss_kind=self.loss_kind,
            rules=rules or Rules(),
            transport=plan.transport,
            seed=seed,
            precision=self.precision,
            device=device or torch.device("cpu"),
            pieces=pieces,
        )


def captured(request: RunRequest, *, phase: Phase | None = None) -> Flat | None:
    """Captures the graph of a model. Returns None for a list of layers. Raises if an id is outside its vocabulary."""
    if not is_captured(request.module):
        return None
    with (phase or _silent)("capture"):
        flat = flatten(request.module, request.example, own_loss=request.loss is not None)
    refuse_ids(vocabularies(flat), request.example, flat.columns)
    return flat


def prepare(request: RunRequest, flat: Flat | None = None, *, phase: Phase | None = None) -> PreparedRun:
    """Prepares a run, without communication with other processes. Raises MeshwrightError if the run is not possible.

    Args:
        request: The inputs of the run.
        flat: The graph of the model, if `captured` has already returned it.
        phase: Called with the name of each phase; the phase runs in the context that it returns.
    """
    phase, plan = phase or _silent, request.parallel
    if request.steps is None:
        refuse_cyclic_precision(plan, request.precision.compute)
    stages = request.stages or (stages_to_train(plan) if request.steps is None else stages_of(plan))
    if isinstance(request.model, Skeleton):
        fill_small_buffers(request.model, request.weights)
    flat = flat or captured(request, phase=phase)
    graph, evaluation = None, Evaluation()
    if flat is not None:
        with phase("cut"), explaining_chunks(plan):
            graph = _cut(request, flat, stages)
        if request.check_capture:
            with phase("check"):
                evaluation = check_start(_start(request, graph))
                graph = graph.with_evaluation(request.module, evaluation.graph)
    sharded = None
    if (tensor := tensor_cut(plan)) is not None:
        refuse_unsharded(plan, captured=graph is not None)
        with phase("shard"):
            assert graph is not None
            rows, own_loss = _microbatch_rows(request), request.loss is not None
            sharded = shard_graph(request.module, graph.flat, graph.cuts, tensor, rows, own_loss=own_loss)
    with phase("schedule"), explaining_chunks(plan):
        cuts = plan.stages or None
        layers = graph.open(request.module) if graph else listed_layers(request.module, stages, cuts)
        schedule, kept = _lists(request, layers)
        if sharded is not None:
            refuse_versions(plan, flush=schedule.flush)
        how = (request.loss, request.count, request.loss_kind, request.precision, layers.costs)
        run = PreparedRun(plan, schedule, None, graph, kept, evaluation, sharded, *how)
        if schedule.flush or run.is_segmented:
            run = replace(run, forwards=forward_schedule(schedule if schedule.flush else run.segment(1)))
    return run


def _cut(request: RunRequest, flat: Flat, stages: int) -> CutGraph:
    plan, own_loss = request.parallel, request.loss is not None
    return cut_graph(request.module, request.example, flat, stages, at=plan.stages or None, own_loss=own_loss)


def _microbatch_rows(request: RunRequest) -> list[int]:
    """Returns the numbers of rows that microbatches have."""
    plan, example = request.parallel, request.example
    given = len(next(iter(example.values())) if isinstance(example, Mapping) else example[0])
    return sorted(microbatch_sizes(request.step_rows or (given,), copies=plan.copies, microbatches=plan.microbatches)) or [1]


def _start(request: RunRequest, graph: CutGraph) -> Start:
    """Returns the inputs of the start check."""
    plan = request.parallel
    return Start(
        request.model,
        graph.flat,
        request.example,
        loss=request.loss,
        count=None if request.loss is None else request.count,  # the model's own loss counts its items itself
        loss_kind=request.loss_kind,
        microbatches=plan.microbatches * plan.copies,
        more=request.more_rows,
        precision=request.precision,
        weights=request.weights,
        graph=graph,
    )


def _lists(request: RunRequest, layers: Layers) -> tuple[Schedule, tuple[KeptBytes, ...] | None]:
    """Returns the proved schedule for these layers, and the bytes that stages keep if recompute has a memory budget."""
    plan = request.parallel
    objective = Objective(request.loss, weigh=layers.weigh, count=request.count, kind=request.loss_kind)
    kept = None
    if plan.budget_bytes is not None:
        cuts, copies = (1, 1) if request.one_microbatch else (plan.microbatches, plan.copies)
        batch = Batch(request.example, microbatches=cuts, copies=copies, names=layers.columns)
        kept = saved_bytes(layers, batch, objective=objective, precision=request.precision)
    continues = request.steps is None and plan.mode.is_cyclic
    steps = request.steps or (SEGMENT if continues else 1)
    schedule = lists_for(plan, ties=layers.ties, steps=steps, first=int(continues), kept=kept, costs=layers.costs)
    if request.steps is None:
        refuse_without_flush(plan, flush=schedule.flush)
    return schedule, kept


def _silent(_: str) -> AbstractContextManager[None]:
    return nullcontext()
