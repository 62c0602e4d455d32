"""The layers of a captured model on one rank of a tensor-parallel box.

A settled graph holds for batches of one shape. Batches of other shapes are settled again when they come, and captured again
only if the trace itself does not hold for them. Every rank does this on its own and gets the same, because only shapes matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.capture.shard.open_sharded import TensorCut, counted_here, open_settled, settled_for
from meshwright.capture.shard.parts import cut_parameters, part_of
from meshwright.capture.shard.settle import Settled
from meshwright.capture.shard.steps import ParameterCut
from meshwright.capture.split import ChosenCuts, cuts_like
from meshwright.capture.trace.batch_columns import Columns
from meshwright.capture.trace.export import trace
from meshwright.capture.trace.graph import Flat, Node, NodeKind
from meshwright.costs.planned import planned_grid, planned_scheme
from meshwright.costs.scheme import Grid
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.profile import relative_costs
from meshwright.runtime.stage.layers import Layers, Shapes
from meshwright.runtime.stage.precision import Precision
from meshwright.runtime.stage.tensor_parameters import TensorParameters
from meshwright.tensor.group_wires import GroupWires
from meshwright.tensor.wires import Wires


def tensor_cut(plan: Parallel) -> TensorCut | None:
    """Returns how a plan shards a model; None if every parameter is whole."""
    grid = planned_grid(plan)
    return None if grid is None else TensorCut(grid, planned_scheme(plan, grid), plan.replicate)


def refuse_unsharded(plan: Parallel, precision: Precision, *, captured: bool) -> None:
    """Raises for what cannot be combined with tensor parallelism."""
    if not captured:
        raise MeshwrightError(
            f"tp={plan.tp} shards the graph of a captured model, but this model is a list of layers",
            fix="pass the model as one module, or tp=1",
        )
    if plan.overlap:
        raise MeshwrightError(f"overlap=True with tp={plan.tp} does not run yet", fix="overlap=False")
    if plan.budget_bytes is not None:
        raise MeshwrightError(f"a recompute budget with tp={plan.tp} does not run yet", fix="recompute='inline'")
    if precision.dtype is not None:
        raise MeshwrightError(f"precision {precision.compute} with tp={plan.tp} does not run yet", fix="precision='fp32'")


def refuse_versions(plan: Parallel, *, flush: bool) -> None:
    """Raises if a schedule keeps old versions of parameters, which gathered weights do not read."""
    if not flush:
        raise MeshwrightError(
            f"{plan.schedule} has no flush and keeps versions of parameters, which tp={plan.tp} cannot read",
            fix="a schedule with a flush, or tp=1",
        )


@dataclass(frozen=True)
class ShardedGraph:
    """A cut graph under a tensor mode: data that every rank opens."""

    tensor: TensorCut
    settled: Settled
    whole: Settled
    """The same with whole outputs, for evaluation and for loss functions of the user."""

    @property
    def grid(self) -> Grid:
        """The ranks of a box."""
        return self.tensor.grid

    def part(self, name: str, tensor: Tensor, coordinate: int) -> Tensor:
        """Returns the part of a whole parameter, or of its gradient, at a coordinate."""
        return part_of(tensor, self.cut(name).layout, self.grid, coordinate)

    def cut(self, name: str) -> ParameterCut:
        """Returns how a parameter is cut, by its first name."""
        return self.settled.cuts[name]

    def cut_held(self, layers: Layers, held: Iterable[nn.Module], coordinate: int) -> None:
        """Replaces the parameters of some layers by the parts of this coordinate."""
        assert layers.digest, "computed while parameters are whole, because each rank cuts only those of its own stages"
        mine = {p for layer in held for p in layer.parameters()}
        named = {name: p for p, name in layers.names.items() if p in mine}
        cut_parameters(named, {name: self.cut(name) for name in named}, self.grid, coordinate)

    def open(self, model: nn.Module, cuts: ChosenCuts, columns: Columns | None, coordinate: int, *, own_loss: bool) -> Layers:
        """Returns the layers of this rank. Their parameters are still whole."""
        wires = GroupWires(self.grid, coordinate)
        opened = Opened(model, cuts, columns, None, self.tensor, wires)
        train = opened.layers(self.whole if own_loss else self.settled, whole_outputs=own_loss)
        return replace(train, evaluation=opened.layers(self.whole, whole_outputs=True), tensor=self._parameters(train, wires))

    def _parameters(self, layers: Layers, wires: Wires) -> TensorParameters:
        cuts = {parameter: self.cut(name) for parameter, name in layers.names.items()}
        unsummed = {parameter: self.grid.wide(cut.unsummed) for parameter, cut in cuts.items()}
        return TensorParameters(wires, unsummed, {parameter: counted_here(cut, wires) for parameter, cut in cuts.items()})


def shard_graph(model: nn.Module, flat: Flat, cuts: ChosenCuts, tensor: TensorCut, rows: Sequence[int]) -> ShardedGraph:
    """Settles a cut graph under a tensor mode, for microbatches with these numbers of rows.

    Raises:
        MeshwrightError: An operation has no rule, or a size does not divide.
    """
    shapes = {name: node.size.shape for name, node in _columns(flat).items() if node.size is not None}
    every = [{name: (count, *shape[1:]) for name, shape in shapes.items()} for count in sorted(set(rows), reverse=True)]
    settled = [settled_for(model, flat, cuts, tensor, of) for of in every]
    return ShardedGraph(tensor, settled[0], settled_for(model, flat, cuts, tensor, every[0], whole_outputs=True))


@dataclass(frozen=True)
class Opened:
    """Makes layers of a model on one rank, for batches of any shape."""

    model: nn.Module
    cuts: ChosenCuts
    columns: Columns | None
    device: torch.device | None
    tensor: TensorCut
    wires: Wires

    def layers(self, settled: Settled, *, whole_outputs: bool) -> Layers:
        """Returns the layers of a settled graph."""
        split = open_settled(self.model, settled, self.cuts, self.wires, self.device)
        flat = split.flat
        shapes = {name: settled.sizes.shapes[node.name] for name, node in _columns(flat).items()}
        again = None if self.columns is None else Resettle(self, flat, self.columns, settled.cuts, whole_outputs)
        found = Layers(split.modules, split.starts, split.names, flat.columns, split.weigh, OneShape(flat, shapes), again)
        return replace(found, dtypes=flat.dtypes, moved=flat.moved, costs=relative_costs(self.cuts.flops), graph=flat.digest)


@dataclass(frozen=True)
class OneShape:
    """Says why a settled graph cannot run on columns of some shapes."""

    flat: Flat
    shapes: Shapes

    def __call__(self, shapes: Shapes) -> str | None:
        """Returns the reason, or None."""
        if (why := self.flat.refusal(shapes)) is not None:
            return why
        other = next((name for name, shape in shapes.items() if name in self.shapes and tuple(shape) != self.shapes[name]), None)
        return None if other is None else f"{other} of the shape {'x'.join(map(str, self.shapes[other]))}"


@dataclass(frozen=True)
class Resettle:
    """Settles a model again for columns of other shapes."""

    opened: Opened
    flat: Flat
    columns: Columns
    cuts: Mapping[str, ParameterCut]
    whole_outputs: bool

    def __call__(self, given: Mapping[str, Tensor]) -> Layers:
        """Returns the layers for columns of these shapes."""
        shapes = {name: tuple(t.shape) for name, t in given.items()}
        flat, opened = self.flat, self.opened
        if flat.refusal(shapes) is not None:
            flat = trace(opened.model, self.columns, given, training=flat.training)
            opened = replace(opened, cuts=cuts_like(opened.cuts, opened.model, flat))
        settled = settled_for(opened.model, flat, opened.cuts, opened.tensor, shapes, whole_outputs=self.whole_outputs)
        if settled.cuts != self.cuts:
            raise MeshwrightError("columns of these sizes would cut the parameters of the model in another way")
        return opened.layers(settled, whole_outputs=self.whole_outputs)


def _columns(flat: Flat) -> dict[str, Node]:
    return {node.target: node for node in flat.nodes if node.kind is NodeKind.COLUMN}
