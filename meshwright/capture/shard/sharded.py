"""Shards a captured model under a tensor mode: settles it once as data, then opens it as modules on every rank.

    tensor = TensorCut.of("box", TensorRequest(box=(2, 2, 1)))
    plan = shard_plan(model, flat, tensor)                        once, the same on all ranks, no weights needed
    plan.settled.cuts["lm_head.weight"]                           how a parameter is cut, and the axes of its partial gradient
    layers = open_plan(model, plan, wires)                        modules of this rank, called like captured layers

A batch of another shape is settled again (`resized`). Parameters must be cut in the same way for all shapes, which is checked.
With `overlap` a plan also contains its two halves, if its rows can be halved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise

import torch
from torch import nn

from meshwright.capture.cut.label_counter import label_counter
from meshwright.capture.cut.stage_modules import Captured, States
from meshwright.capture.model_graph import line_of
from meshwright.capture.shard.emit import shard_layers
from meshwright.capture.shard.layouts.layout import axes_of, local
from meshwright.capture.shard.layouts.sizes import Shape, example_sizes, sizes_for
from meshwright.capture.shard.layouts.steps import ParameterCut
from meshwright.capture.shard.row_halves import RowLoss, half_rows, row_loss, zero_where_nothing_counts
from meshwright.capture.shard.settle import Settled, settle
from meshwright.capture.shard.woven_layer import HalfLosses, LayerPart, WovenLayer
from meshwright.capture.split import ChosenCuts, Split
from meshwright.capture.trace.graph import Flat, NodeKind
from meshwright.costs.declared import Phase
from meshwright.costs.modes import mode
from meshwright.costs.scheme import Grid, Save, Scheme, TensorRequest
from meshwright.errors import MeshwrightError
from meshwright.tensor.global_dropout import RowWindow
from meshwright.tensor.weave.pieces import PieceGraph, cut
from meshwright.tensor.weave.split_product import JobSlot
from meshwright.tensor.wires.wires import Wires

Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class TensorCut:
    """How a model is sharded."""

    grid: Grid
    scheme: Scheme
    replicate: tuple[str, ...] = ()
    """Modules whose parameters stay whole."""
    overlap: bool = False
    """Whether microbatches run in two halves of their rows, if they can be halved."""

    @classmethod
    def of(cls, name: str, asked: TensorRequest, *, save: Save = Save.SHARDS, replicate: Sequence[str] = ()) -> TensorCut:
        """Returns a mode (`line`, `grid`, `tesseract` or `box`) with the requested sizes."""
        grid = mode(name).grid(asked)
        return cls(grid, mode(name).scheme(grid, save=save), tuple(replicate))


@dataclass(frozen=True)
class ShardPlan:
    """A model under a mode, for batches of one shape."""

    tensor: TensorCut
    settled: Settled
    whole_outputs: bool = False
    """Whether every rank gets the whole outputs of the model."""
    halves: tuple[Settled, ...] = field(default=())
    """The settled halves of a microbatch, if it runs in two halves."""
    loss: RowLoss = field(default_factory=RowLoss)
    """How the losses of halves are combined."""

    def resized(self, model: nn.Module, shapes: Shapes, flat: Flat | None = None, places: Sequence[int] = ()) -> ShardPlan:
        """Returns the plan for a batch of other shapes, or for another graph of the model with the same cuts."""
        places = tuple(places) or self.settled.places
        flat = flat or self.settled.line.flat
        found = shard_plan(model, flat, self.tensor, shapes, places=places, whole_outputs=self.whole_outputs)
        if found.settled.cuts != self.settled.cuts:
            raise MeshwrightError(
                "a batch of this shape needs another cut of the parameters than the first batch", fix="batches of one shape"
            )
        return found

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the columns."""
        nodes = [node for node in self.settled.line.flat.nodes if node.kind is NodeKind.COLUMN]
        return {node.target: self.settled.sizes.shapes[node.name] for node in nodes}

    def words(self, layer: int) -> dict[Phase, Fraction]:
        """Returns the transfers that are declared for a layer. Halves share gathered weights."""
        found = [t for k, half in enumerate(self.halves or (self.settled,)) for t in half.layer_transfers(layer, weights=not k)]
        return {phase: sum((t.words for t in found if t.phase is phase), Fraction(0)) for phase in Phase}


def shard_plan(
    model: nn.Module,
    flat: Flat,
    tensor: TensorCut,
    shapes: Shapes | None = None,
    *,
    places: Sequence[int] | None = None,
    whole_outputs: bool = False,
) -> ShardPlan:
    """Settles a captured model under a mode.

    Args:
        model: The model, on any device and on meta; only names, ties and `requires_grad` are read.
        flat: Its captured graph.
        tensor: The mode.
        shapes: The shapes of the columns of a batch; those of the example if not given.
        places: Where layers begin and end; one layer if not given.
        whole_outputs: Gather the outputs of the model, so that every rank has all of them.

    Raises:
        MeshwrightError: A size does not divide, an operation has no rule, or halves of the rows would give another result.
    """
    states, line = States(model), line_of(model, flat)
    ties = {name: states.first[parameter] for name, parameter in states.parameters.items()}
    frozen = [name for parameter, name in states.first.items() if not parameter.requires_grad]

    def settled(columns: Shapes | None) -> Settled:
        sizes = example_sizes(flat) if columns is None else sizes_for(flat, columns)
        return settle(
            line,
            ties,
            tensor.scheme,
            tensor.grid,
            sizes=sizes,
            places=places,
            replicate=tensor.replicate,
            frozen=frozen,
            whole_outputs=whole_outputs,
        )

    found = ShardPlan(tensor, settled(shapes), whole_outputs)
    rows = half_rows(found.settled.sizes.rows, tensor.scheme, tensor.grid) if tensor.overlap else None
    if rows is None:
        return found
    halves = tuple(settled({name: (count, *shape[1:]) for name, shape in found.shapes.items()}) for count in rows)
    loss = row_loss(found.settled, halves[0])
    if loss.counts_labels and label_counter(line, states) is None:
        raise MeshwrightError("overlap=True cannot count the labels of the model's loss", fix="overlap=False")
    if any(half.cuts != found.settled.cuts for half in halves):
        raise MeshwrightError(
            "halves of a microbatch need another cut of the parameters than whole microbatches", fix="overlap=False"
        )
    return replace(found, halves=tuple(map(zero_where_nothing_counts, halves)), loss=loss)


def open_plan(
    model: nn.Module, plan: ShardPlan, wires: Wires, *, starts: Sequence[int] | None = None, device: torch.device | None = None
) -> list[WovenLayer]:
    """Returns the layers of this rank. `starts` are the first layers of stages; a stage computes values of columns once."""
    states, settled = States(model), plan.settled
    starts = starts or (0, len(settled.programs))
    parts: list[list[LayerPart]] = [[] for _ in settled.programs]
    begin = 0
    for of in plan.halves or (settled,):
        window, slot = RowWindow(begin, of.sizes.rows, settled.sizes.rows), JobSlot()
        begin += of.sizes.rows
        for first, last in pairwise(starts):
            stage = replace(of, places=of.places[first : last + 1], programs=of.programs[first:last])
            for number, layer in zip(range(first, last), shard_layers(stage, states, wires, device), strict=True):
                if parts[number]:  # halves share the values that are computed from columns for all rows
                    layer.prelude = parts[number][0].layer.prelude
                parts[number].append(_part(of, number, layer, cut(layer.body, wires, slot), window))
    found = [WovenLayer(own, save=settled.scheme.save, words=plan.words(k)) for k, own in enumerate(parts)]
    if plan.halves:
        count = label_counter(settled.line, states, device) if plan.loss.counts_labels else None
        found[-1].take_losses(HalfLosses(count, () if count is None else count.columns, plan.loss.adds))
    for layer in found:
        layer.train(model.training)
    return found


def _part(of: Settled, number: int, layer: Captured, pieces: PieceGraph, window: RowWindow) -> LayerPart:
    given = of.programs[number].given
    rows = tuple(local(of.layouts[name][0], of.grid) if of.layouts[name] else 1 for name in given)
    return LayerPart(layer, pieces, window, rows, {name: of.sizes.grows[name] for name in layer.free if name in of.sizes.grows})


def open_split(model: nn.Module, plan: ShardPlan, cuts: ChosenCuts, wires: Wires) -> Split:
    """Returns the layers of this rank, in stages."""
    states, flat = States(model), plan.settled.line.flat
    layers = open_plan(model, plan, wires, starts=cuts.starts)
    return Split(tuple(layers), states.first, label_counter(plan.settled.line, states), flat, cuts)


def counted_here(cut: ParameterCut, wires: Wires) -> bool:
    """Whether this rank counts a shard in a norm: exactly one of the ranks with equal shards does."""
    axes = axes_of(cut.layout)
    return all(at == 0 for axis, at in wires.at.items() if axis not in axes)
