"""The layers of a captured model on one rank of a tensor-parallel box.

A settled graph is valid for batches of one shape. Batches of other shapes are settled again when they first appear, and captured
again only if the trace is not valid for them. Every rank does this on its own and gets the same result: only shapes matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from meshwright.capture.shard.layouts.layout import axes_of, bare
from meshwright.capture.shard.layouts.parts import StoredCut, part_of
from meshwright.capture.shard.layouts.steps import ParameterCut
from meshwright.capture.shard.sharded import ShardPlan, TensorCut, counted_here, open_split, shard_plan
from meshwright.capture.split import ChosenCuts, cuts_like
from meshwright.capture.trace.batch_columns import Columns
from meshwright.capture.trace.export import trace
from meshwright.capture.trace.graph import Flat, NodeKind
from meshwright.costs.planned_grid import planned_grid, planned_scheme
from meshwright.costs.scheme import Grid
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.stage_cost import relative_costs
from meshwright.runtime.stage.layers import Layers, Shapes
from meshwright.runtime.stage.tensor_parameters import TensorParameters
from meshwright.tensor.wires.group_wires import GroupWires
from meshwright.tensor.wires.wires import Wires
from meshwright.train.setup.captured_layers import CutGraph
from meshwright.train.setup.whole_layers import whole_layers, whole_shapes


def tensor_cut(plan: Parallel) -> TensorCut | None:
    """Returns how a plan shards a model; None if every parameter is whole."""
    grid = planned_grid(plan)
    return None if grid is None else TensorCut(grid, planned_scheme(plan, grid), plan.replicate, plan.overlap)


def refuse_unsharded(plan: Parallel, *, captured: bool) -> None:
    """Raises for what cannot be combined with tensor parallelism."""
    if not captured:
        raise MeshwrightError(
            f"tp={plan.tp} shards the graph of a captured model, but this model is a list of layers",
            fix="pass the model as one module, or tp=1",
        )
    if plan.budget_bytes is not None:
        raise MeshwrightError(f"a recompute budget with tp={plan.tp} does not run yet", fix="recompute='inline'")


def refuse_versions(plan: Parallel, *, flush: bool) -> None:
    """Raises if a schedule keeps old versions of parameters, which gathered weights do not read."""
    if not flush:
        cyclic = plan.mode.is_cyclic
        name = f'dp_mode="{plan.mode}"' if cyclic else plan.schedule
        raise MeshwrightError(
            f"{name} has no flush and keeps versions of parameters, which tp={plan.tp} cannot read",
            fix='dp_mode="zero-1", or tp=1' if cyclic else "a schedule with a flush, or tp=1",
        )


@dataclass(frozen=True)
class ShardedGraph:
    """A cut graph under a tensor mode: data that every rank opens."""

    train: ShardPlan
    evaluation: ShardPlan
    """The same plan with whole outputs and without halves."""

    @property
    def grid(self) -> Grid:
        """The ranks of a box."""
        return self.train.tensor.grid

    def part(self, name: str, tensor: Tensor, coordinate: int) -> Tensor:
        """Returns the part of a whole parameter, or of its gradient, at a coordinate."""
        return part_of(tensor, self.cut(name).layout, self.grid, coordinate)

    def cut(self, name: str) -> ParameterCut:
        """Returns how a parameter is cut, by its first name."""
        return self.train.settled.cuts[name]

    def cut_params(self, layers: Layers) -> list[nn.Parameter]:
        """Returns the parameters of which a rank holds a part."""
        return [p for p, name in layers.names.items() if axes_of(bare(self.cut(name).layout, self.grid))]

    def open(self, model: nn.Module, graph: CutGraph, coordinate: int) -> Layers:
        """Returns the layers of this rank. Their parameters are still whole.

        Batches of evaluation whose sizes do not divide run on whole layers, and so does a graph that is only for evaluation.
        """
        wires, plain = GroupWires(self.grid, coordinate), graph.open(model)
        parameters = self._parameters(plain.names, wires)
        whole = whole_layers(plain.evaluation or plain, parameters)
        opened = Opened(model, graph.cuts, graph.columns, wires, parameters)
        evaluation = whole if plain.evaluation else opened.layers(self.evaluation, otherwise=whole)
        return replace(opened.layers(self.train), evaluation=evaluation, tensor=parameters, any_size=whole)

    def _parameters(self, names: Mapping[nn.Parameter, str], wires: Wires) -> TensorParameters:
        cuts = {parameter: self.cut(name) for parameter, name in names.items()}
        unsummed = {parameter: self.grid.wide(cut.unsummed) for parameter, cut in cuts.items()}
        counted = {parameter: counted_here(cut, wires) for parameter, cut in cuts.items()}
        stored = {parameter: StoredCut(cut.layout, self.grid) for parameter, cut in cuts.items()}
        sums = self.train.settled.sum_words()
        return TensorParameters(wires, unsummed, counted, stored, {parameter: sums[name] for parameter, name in names.items()})


def shard_graph(
    model: nn.Module, flat: Flat, cuts: ChosenCuts, tensor: TensorCut, rows: Sequence[int], *, own_loss: bool
) -> ShardedGraph:
    """Settles a cut graph under a tensor mode, for microbatches with these numbers of rows.

    Args:
        model: The model.
        flat: Its graph.
        cuts: Where layers and stages begin.
        tensor: The mode.
        rows: The rows of microbatches. All of them must be possible.
        own_loss: The user's loss function reads the outputs of the model, so that they must be whole.

    Raises:
        MeshwrightError: An operation has no rule, or a size does not divide.
    """
    shapes = {node.target: node.size.shape for node in flat.nodes if node.kind is NodeKind.COLUMN and node.size is not None}
    every = [{name: (count, *shape[1:]) for name, shape in shapes.items()} for count in sorted(set(rows), reverse=True)]
    train = shard_plan(model, flat, tensor, every[0], places=cuts.places, whole_outputs=own_loss)
    for short in every[1:]:
        try:
            train.resized(model, short)
        except MeshwrightError as error:
            raise MeshwrightError(
                f"{error.what}; a short last step of an epoch has such microbatches",
                fix=f"dataloader_drop_last=True, or batches that divide ({error.fix})",
            ) from error
    plain = replace(tensor, overlap=False)
    return ShardedGraph(train, shard_plan(model, flat, plain, every[0], places=cuts.places, whole_outputs=True))


@dataclass(frozen=True)
class Opened:
    """Makes layers of a model on one rank, for batches of any shape."""

    model: nn.Module
    cuts: ChosenCuts
    columns: Columns | None
    wires: Wires
    parameters: TensorParameters

    def layers(self, plan: ShardPlan, *, otherwise: Layers | None = None) -> Layers:
        """Returns the layers of a plan. `otherwise` are layers for batches that the mode cannot cut."""
        split = open_split(self.model, plan, self.cuts, self.wires)
        flat = split.flat
        again = None if self.columns is None else Resettle(self, plan, self.columns, otherwise)
        found = Layers(split.modules, split.starts, split.names, flat.columns, split.weigh, OneShape(flat, plan.shapes), again)
        graph = f"{flat.digest} {plan.tensor}"  # ranks compare it before they share a collective
        return replace(found, dtypes=flat.dtypes, moved=flat.moved, costs=relative_costs(self.cuts.flops), graph=graph)


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
    plan: ShardPlan
    columns: Columns
    otherwise: Layers | None = None

    def __call__(self, given: Mapping[str, Tensor]) -> Layers:
        """Returns the layers for columns of these shapes."""
        shapes = {name: tuple(t.shape) for name, t in given.items()}
        flat, opened = self.plan.settled.line.flat, self.opened
        if flat.refusal(shapes) is not None:
            with whole_shapes(opened.parameters):
                flat = trace(opened.model, self.columns, given, training=flat.training)
                opened = replace(opened, cuts=cuts_like(opened.cuts, opened.model, flat))
        try:
            plan = self.plan.resized(opened.model, shapes, flat, opened.cuts.places)
        except MeshwrightError:
            if self.otherwise is None:
                raise
            return self._otherwise(given, shapes)
        return opened.layers(plan, otherwise=self.otherwise)

    def _otherwise(self, given: Mapping[str, Tensor], shapes: Shapes) -> Layers:
        """Returns whole layers for columns of these shapes."""
        assert self.otherwise is not None
        if self.otherwise.refusal is None or self.otherwise.refusal(shapes) is None or self.otherwise.again is None:
            return self.otherwise
        return self.otherwise.again(given)
