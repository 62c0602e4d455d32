"""The layers of what a user built: a list as it is, a module captured, cut into the stages of a plan.

layers = layers_for(model, batch, stages)         what the engine runs
layers_for(model, batch, stages, flat=flat)       the same from a graph that was captured before
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.capture.split import ChosenCuts, Split, choose_cuts, cuts_like, open_cuts, open_like, split_like
from meshwright.capture.trace.batch_columns import Columns, columns_of
from meshwright.capture.trace.export import flatten, results, trace
from meshwright.capture.trace.graph import Flat, refs
from meshwright.capture.trace.unsupported_modules import require_ready
from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.ir.profile import relative_costs
from meshwright.runtime.stage.batch import Batch
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.layers import columns_of as stage_columns
from meshwright.torch_internals import forward_hooks

LISTS = (nn.Sequential, nn.ModuleList, list, tuple)
"""What is a list of layers already."""


def is_captured(built: Any) -> bool:
    """Is this a model to capture, rather than a list of layers?"""
    if isinstance(built, nn.Sequential):
        own = type(built).forward is not nn.Sequential.forward or "forward" in vars(built)
        return own or forward_hooks(built)
    return isinstance(built, nn.Module) and not isinstance(built, LISTS)


def layers_for(
    built: Any,
    example_batch: Any,
    stages: int,
    *,
    cuts: Sequence[str | int] | None = None,
    flat: Flat | None = None,
    device: torch.device | None = None,
    own_loss: bool = False,
    evaluated: Flat | None = None,
) -> Layers:
    """Cut into stages; with an own loss function the model is captured without its labels.

    `evaluated` is the model's graph in evaluation, where that is another one.
    """
    if not is_captured(built):
        return listed_layers(built, stages, cuts)
    flat = flat or flatten(built, example_batch, own_loss=own_loss)
    return cut_graph(built, example_batch, flat, stages, at=cuts, own_loss=own_loss, evaluated=evaluated).open(built, device)


def listed_layers(built: Any, stages: int, cuts: Sequence[str | int] | None = None) -> Layers:
    """A list of layers, cut into even runs."""
    if cuts:
        raise MeshwrightError("stages name modules of a captured model, this is a list of layers", fix="stages=()")
    found = Layers.of(built, stages)
    require_ready(found.modules)
    return found


@dataclass(frozen=True)
class CutGraph:
    """The graph of a captured model and where it is cut: data that every rank opens for its own copy of the model."""

    flat: Flat
    cuts: ChosenCuts
    columns: Columns | None
    """How the model is called, so that it can be captured again for other sizes; None where nothing says so."""
    evaluated: Flat | None = None
    """The model's graph in evaluation, where that is another one."""
    evaluated_cuts: ChosenCuts | None = None

    def open(self, model: nn.Module, device: torch.device | None = None) -> Layers:
        """The layers of an equal model, with its own parameters."""
        found = open_cuts(model, self.flat, self.cuts, device)
        if self.columns is None:
            return engine_layers(found, None)
        again = Again(model, self.columns, found, device)
        if self.evaluated is None or self.evaluated_cuts is None:
            return again.layers(found)
        other = open_like(found, model, self.evaluated, self.evaluated_cuts, device)
        return replace(again.layers(found), evaluation=again.layers(other))

    def with_evaluation(self, model: nn.Module, evaluated: Flat | None) -> CutGraph:
        """With another graph for evaluation, cut at the same modules."""
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
    """Choose where a captured model is cut. Without an example nothing says how the model would be called again."""
    columns = None if example_batch is None else columns_of(model, example_batch, own_loss=own_loss)
    return CutGraph(flat, choose_cuts(model, flat, stages, at=at), columns).with_evaluation(model, evaluated)


def engine_layers(cut: Split, again: Again | None) -> Layers:
    """A cut model as an engine takes it."""
    flat = cut.flat
    found = Layers(cut.modules, cut.starts, cut.names, flat.columns, cut.weigh, flat.refusal, again, flat.dtypes, flat.moved)
    return replace(found, costs=relative_costs(cut.cuts.flops), graph=flat.digest)


@dataclass(frozen=True)
class Again:
    """Captures a model once more, for columns of other sizes, and cuts it as before."""

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
        """A cut model with what captures it once more."""
        return engine_layers(cut, replace(self, first=cut))


def refuse_lossless(flat: Flat, example_batch: Any, *, own_loss: bool = False) -> None:
    """Is there something to train on: a loss that the model returns, or a target to compare its output with?"""
    given = Batch(example_batch, microbatches=1, names=flat.columns)
    size = flat.by_name[next(refs(flat.result)).name].size
    if given.target is None and (own_loss or size is None or size.shape):
        raise MeshwrightError(
            f"there is no loss to train on: from {', '.join(map(repr, flat.columns))} the model gives {flat.outputs[0]!r}, and "
            "the data set has no labels besides",
            fix=f"a data set with {TARGETS[0]!r}, or a data_collator that adds them",
        )


@dataclass(frozen=True)
class Uncut:
    """A model as its author wrote it, with other tensors for its parameters."""

    model: nn.Module
    columns: Columns

    @classmethod
    def of(cls, model: nn.Module, example_batch: Any, *, own_loss: bool = False) -> Uncut:
        """With the columns that it would be captured with."""
        return cls(model, columns_of(model, example_batch, own_loss=own_loss))

    def __call__(self, weights: Mapping[nn.Parameter, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
        """Its loss, or its output."""
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
    """Captured layers one after another in this process, as they are, in the mode they are in."""
    values: tuple[Tensor, ...] = ()
    again: dict[int, Any] = {}
    for layer in layers.modules:
        values = layer(*values, made_again=again, **{name: columns[name] for name in stage_columns(layer)})
    return values
