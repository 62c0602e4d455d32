"""The layers of a user's model, cut into the stages of a plan. A list of layers is used as it is; a module is captured.

graph = cut_graph(model, batch, flat, stages)     chooses the cuts of a captured graph, once
layers = graph.open(model)                        on every rank: the layers that the engine runs
layers = listed_layers(layers, stages)            the same for a list of layers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.capture.split import ChosenCuts, Split, choose_cuts, cuts_like, open_cuts, open_like, split_like
from meshwright.capture.trace.batch_columns import Columns, columns_of
from meshwright.capture.trace.export import results, trace
from meshwright.capture.trace.graph import Flat, refs
from meshwright.capture.trace.unsupported_modules import require_ready
from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.ir.stage_cost import relative_costs
from meshwright.runtime.stage.batch import Batch
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.layers import columns_of as stage_columns
from meshwright.torch_internals import forward_hooks

LISTS = (nn.Sequential, nn.ModuleList, list, tuple)
"""Types that are a list of layers."""


def is_captured(built: Any) -> bool:
    """Returns whether this model must be captured. A list of layers must not."""
    if isinstance(built, nn.Sequential):
        own = type(built).forward is not nn.Sequential.forward or "forward" in vars(built)
        return own or forward_hooks(built)
    return isinstance(built, nn.Module) and not isinstance(built, LISTS)


def listed_layers(built: Any, stages: int, cuts: Sequence[str | int] | None = None) -> Layers:
    """Cuts a list of layers into stages with an equal number of layers, or at the numbers of layers in `cuts`."""
    if any(isinstance(cut, str) for cut in cuts or ()):
        raise MeshwrightError(
            "stages= names modules of a captured model, but this model is a list of layers",
            fix="stages=(2, 4), numbers of layers",
        )
    found = Layers.of(built, stages)
    require_ready(found.modules)
    if not cuts:
        return found
    starts = (0, *(int(cut) for cut in cuts), len(found.modules))
    if len(starts) != stages + 1 or any(first >= last for first, last in pairwise(starts)):
        raise MeshwrightError(
            f"stages={tuple(cuts)} does not cut {len(found.modules)} layers into {stages} stages",
            fix=f"{stages - 1} numbers of layers, from 1 to {len(found.modules) - 1}, each larger than the one before",
        )
    return replace(found, starts=starts)


@dataclass(frozen=True)
class CutGraph:
    """The graph of a captured model and its cuts. Every rank opens this data for its own copy of the model."""

    flat: Flat
    cuts: ChosenCuts
    columns: Columns | None
    """How the model is called, to capture it again for other sizes. None if that is unknown."""
    evaluated: Flat | None = None
    """The graph of the model in evaluation mode, if it differs from the graph in training mode."""
    evaluated_cuts: ChosenCuts | None = None

    def open(self, model: nn.Module, device: torch.device | None = None) -> Layers:
        """Returns the layers for an equal model, with the parameters of that model."""
        found = open_cuts(model, self.flat, self.cuts, device)
        if self.columns is None:
            return engine_layers(found, None)
        recapture = Recapture(model, self.columns, found, device)
        if self.evaluated is None or self.evaluated_cuts is None:
            return recapture.layers(found)
        other = open_like(found, model, self.evaluated, self.evaluated_cuts, device)
        return replace(recapture.layers(found), evaluation=recapture.layers(other))

    def with_evaluation(self, model: nn.Module, evaluated: Flat | None) -> CutGraph:
        """Returns the same cuts with a graph for evaluation, cut at the same modules."""
        cuts = None if evaluated is None else cuts_like(self.cuts, model, evaluated)
        return replace(self, evaluated=evaluated, evaluated_cuts=cuts)


def cut_graph(
    model: nn.Module,
    example_batch: Any,
    flat: Flat,
    stages: int,
    *,
    at: Sequence[str | int] | None = None,
    own_loss: bool = False,
    evaluated: Flat | None = None,
) -> CutGraph:
    """Chooses the cuts of a captured model. Without an example batch the model cannot be captured again for other sizes."""
    columns = None if example_batch is None else columns_of(model, example_batch, own_loss=own_loss)
    return CutGraph(flat, choose_cuts(model, flat, stages, at=at), columns).with_evaluation(model, evaluated)


def engine_layers(cut: Split, recapture: Recapture | None) -> Layers:
    """Converts a cut model to the layers that an engine runs."""
    flat = cut.flat
    found = Layers(cut.modules, cut.starts, cut.names, flat.columns, cut.weigh, flat.refusal, recapture, flat.dtypes, flat.moved)
    return replace(found, costs=relative_costs(cut.cuts.flops), graph=flat.digest)


@dataclass(frozen=True)
class Recapture:
    """Captures a model again for columns of other sizes, and cuts it at the same modules."""

    model: nn.Module
    columns: Columns
    first: Split
    device: torch.device | None

    def __call__(self, given: Mapping[str, Tensor]) -> Layers:
        training = self.first.flat.training
        flat = trace(self.model, self.columns, given, training=training)
        shapes = {name: tuple(t.shape) for name, t in given.items()}
        if flat.refusal(shapes) is not None and any(shape[0] == 1 for shape in shapes.values()):
            flat = trace(self.model, self.columns, given, training=training, one_row=True)
        return self.layers(split_like(self.first, self.model, flat, self.device))

    def layers(self, cut: Split) -> Layers:
        """Returns the layers of a cut model, together with the function that captures it again."""
        return engine_layers(cut, replace(self, first=cut))


def refuse_lossless(flat: Flat, example_batch: Any, *, own_loss: bool = False) -> None:
    """Raises if there is no loss: the model must return one, or the batch must have a target for its output."""
    given = Batch(example_batch, microbatches=1, names=flat.columns)
    size = flat.by_name[next(refs(flat.result)).name].size
    if given.target is None and (own_loss or size is None or size.shape):
        raise MeshwrightError(
            f"there is no loss to train on: from {', '.join(map(repr, flat.columns))} the model returns {flat.outputs[0]!r}, and "
            "the data set has no labels",
            fix=f"a data set with {TARGETS[0]!r}, or a data_collator that adds them",
        )


@dataclass(frozen=True)
class Uncut:
    """The user's model before it is cut. It runs with other tensors in place of its parameters."""

    model: nn.Module
    columns: Columns

    @classmethod
    def of(cls, model: nn.Module, example_batch: Any, *, own_loss: bool = False) -> Uncut:
        """Uses the same columns as the capture."""
        return cls(model, columns_of(model, example_batch, own_loss=own_loss))

    def __call__(self, weights: Mapping[nn.Parameter, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of the model, or its first output if it returns no loss."""
        own = {n: weights[p] for n, p in self.model.named_parameters(remove_duplicate=False) if p in weights}
        call = _Call(self.model, self.columns)
        found = functional_call(call, {f"model.{name}": t for name, t in own.items()}, (dict(columns),), tie_weights=False)
        return next(iter(results(found).values()))


class _Call(nn.Module):
    def __init__(self, model: nn.Module, columns: Columns) -> None:
        super().__init__()
        self.model, self.columns = model, columns

    def forward(self, given: Mapping[str, Tensor]) -> Any:
        return self.columns.call(self.model, given)


def through(layers: Layers, columns: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Runs captured layers one after another in this process, in their current mode."""
    values: tuple[Tensor, ...] = ()
    again: dict[int, Any] = {}
    for layer in layers.modules:
        values = layer(*values, made_again=again, **{name: columns[name] for name in stage_columns(layer)})
    return values
