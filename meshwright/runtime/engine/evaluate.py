"""Forward-only walks on the stages and parameters of an engine. They compute the loss of a batch and the outputs of the model.

The schedule consists of the forwards of the engine's own schedule, so nothing moves between training and evaluation. No graph is
kept, and layers are in eval mode during a walk. A batch may have any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.ir.placement import Rows
from meshwright.ir.schedule import Schedule
from meshwright.passes.check import prove
from meshwright.passes.forward_only import forward_only
from meshwright.passes.lower import lower
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.executor.train_actions import TrainActions
from meshwright.runtime.json_exchange import all_gather_json, dtype_name, dtype_named
from meshwright.runtime.parameters.parameters import Parameters, Rules
from meshwright.runtime.stage.batch import Batch, Given, Own
from meshwright.runtime.stage.graphs_by_size import Graphs
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import LossKind, Objective, Tally
from meshwright.runtime.stage.stage import Stage

Reduce = Callable[[Rows, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Applied to the outputs of some rows on the rank that computes them, before they are sent. It must keep the rows."""


class Outputs(Enum):
    """Which ranks get the outputs of the model."""

    NOBODY = "nobody"
    FIRST = "the first rank"
    EVERYBODY = "every rank"


@dataclass(frozen=True)
class Evaluated:
    """The sum of a batch's losses and its weight (tokens or rows that count), equal on all ranks; the outputs if requested."""

    total: float
    weight: float
    outputs: tuple[Tensor, ...] = ()

    @property
    def loss(self) -> float:
        """The mean over the whole batch."""
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class _Piece:
    """The outputs that one rank has: some rows of its data-parallel copy."""

    rank: int
    copy: int
    start: int
    form: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def to_json(self) -> list[Any]:
        """Returns the description for the other ranks, without the rank, which they know."""
        return [self.copy, self.start, [[list(size), dtype_name(kind)] for size, kind in self.form]]

    @classmethod
    def from_json(cls, rank: int, told: list[Any]) -> _Piece:
        """Reads the description from a rank."""
        copy, start, form = told
        return cls(rank, copy, start, tuple((tuple(size), dtype_named(kind)) for size, kind in form))


class Forward:
    """Evaluates batches on an engine.

    `layers` may be other layers than the engine trains, with the same parameters on each stage. `schedule` is the forward-only
    form of the engine's schedule, if it was created before.
    """

    def __init__(self, engine: Engine, layers: Layers | None = None, *, schedule: Schedule | None = None) -> None:
        self.engine, self.layers = engine, layers or engine.layers.evaluation or engine.layers
        self.schedule = schedule or forward_schedule(engine.schedule)
        mesh, device = engine.mesh, engine.runtime.device
        self.program = engine.runtime.program(self.schedule)
        self.stages = {stage: self._stage(stage, engine.stages[stage]) for stage in self.program.stages}
        self.graphs = Graphs(self.layers, self.stages, device)
        layers_here = {stage: at.layers for stage, at in self.stages.items()}
        parameters = Parameters(self.program, mesh, engine.used_units, layers_here, Rules(), device)
        self.actions = TrainActions(self.program, self.stages, parameters, self.schedule.microbatches, self.graphs)
        self.executor = engine.runtime.executor(self.program, self.actions)
        self._found: list[tuple[Rows, tuple[Tensor, ...]]] = []
        self._reduce: Reduce | None = None

    def __call__(
        self, batch: Given | Own, *, outputs: Outputs = Outputs.NOBODY, reduce: Reduce | None = None, loss: bool = True
    ) -> Evaluated:
        """Evaluates one batch, on all ranks together. Without `loss` the batch needs no target."""
        self._found, self._reduce = [], reduce
        for number, stage in self.stages.items():
            stage.objective = self.engine.stages[number].objective if loss else Objective(wanted=False)
            stage.keep = self._keep if outputs is not Outputs.NOBODY else None
        cut = self._cut(batch)
        with torch.no_grad(), evaluating(self.graphs.modules):
            self.executor.run(0, {0: cut})
        tally = self.actions.tallies.get(0, Tally()) if self.engine.mesh.coordinate == 0 else Tally()
        sums = torch.tensor([float(tally.loss), tally.weight], dtype=torch.float64, device=self.engine.settings.device)
        dist.all_reduce(sums)
        total, weight = sums.tolist()
        weight = 1.0 if loss and self.engine.objective.kind is LossKind.SUM else weight
        return Evaluated(total, weight, self._gathered(outputs))

    def _stage(self, number: int, trained: Stage) -> Stage:
        layers = [layer.to(self.engine.settings.device) for layer in self.layers.of_stage(number)]
        return replace(trained, layers=layers, first_layer=self.layers.starts[number], share=0.0, splits=False)

    def _cut(self, given: Given | Own) -> Batch:
        found = self.engine.runtime.batch(given, microbatches=self.schedule.microbatches, names=self.layers.columns)
        self.graphs.choose(found)
        return found

    def _keep(self, rows: Rows, output: Any) -> None:
        found = outputs_of(output)
        self._found.append((rows, found if self._reduce is None else self._reduce(rows, found)))

    def _gathered(self, outputs: Outputs) -> tuple[Tensor, ...]:
        """Returns the outputs of all rows in order. Ranks first exchange descriptions of their pieces, then the pieces."""
        if outputs is Outputs.NOBODY:
            return ()
        mesh, device = self.engine.mesh, self.engine.settings.device
        mine = {
            _Piece(mesh.rank, mesh.copy, rows.start, tuple((tuple(t.shape), t.dtype) for t in tensors)): tensors
            for rows, tensors in (self._found if mesh.coordinate == 0 else ())  # all ranks of a box have the same outputs
        }
        announced = enumerate(all_gather_json([piece.to_json() for piece in mine]))
        self._found = []
        found = []
        for piece in sorted(
            (_Piece.from_json(rank, told) for rank, part in announced for told in part), key=lambda p: (p.copy, p.start)
        ):
            if outputs is Outputs.EVERYBODY or mesh.rank in (0, piece.rank):
                found.append(_sent(piece, mine.get(piece), device, everybody=outputs is Outputs.EVERYBODY))
        return (
            tuple(torch.cat(parts) for parts in zip(*found, strict=True)) if outputs is Outputs.EVERYBODY or not mesh.rank else ()
        )


def _sent(piece: _Piece, own: tuple[Tensor, ...] | None, device: torch.device, *, everybody: bool) -> tuple[Tensor, ...]:
    """Sends one piece from the rank that has it, to every rank or to the first."""
    rank = dist.get_rank()
    tensors = (
        tuple(map(Tensor.contiguous, own))
        if own is not None
        else tuple(torch.empty(size, dtype=kind, device=device) for size, kind in piece.form)
    )
    for tensor in tensors:
        if everybody:
            dist.broadcast(tensor, src=piece.rank)
        elif piece.rank != 0 and rank == piece.rank:
            dist.send(tensor, dst=0)
        elif piece.rank != 0:
            dist.recv(tensor, src=piece.rank)
    return tensors


def outputs_of(output: Any) -> tuple[Tensor, ...]:
    """Returns the tensors that a last layer returns besides its loss."""
    if isinstance(output, Tensor):
        values: Sequence[Any] = (output,)
    elif isinstance(output, Mapping):
        values = [value for name, value in output.items() if name != "loss"]
    else:
        values = [value for name, value in vars(output).items() if name != "loss"] if hasattr(output, "loss") else tuple(output)
    found = [value for value in values if isinstance(value, Tensor)]
    loss_first = not isinstance(output, Mapping) and found and not found[0].dim()
    return tuple(t.detach().contiguous() for t in (found[1:] if loss_first else found))


def forward_schedule(schedule: Schedule) -> Schedule:
    """Returns one evaluation step of a schedule: only its forwards, lowered and proved."""
    return prove(lower(forward_only(schedule).repeated(1)))


@contextmanager
def evaluating(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Sets eval mode, and restores the mode of each module at the end."""
    modules = list({id(m): m for layer in layers for m in layer.modules()}.values())
    before = [m.training for m in modules]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
