"""One call from a captured model to what a rank runs under a tensor mode.

    plan = shard_plan(model, flat, "box", TensorRequest(box=(2, 2, 1)))      once, the same on all ranks, no weights needed
    plan.settled.cuts["lm_head.weight"]                                      how a parameter is stored, and what is added up
    layers = plan.layers(States(model), wires)                               modules of this rank, called like captured layers
    cut_parameters(...)                                                      its parts of the parameters

A batch of another shape is settled again (`plan.resized`); parameters are cut the same for all shapes, which is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import States
from meshwright.capture.model_graph import line_of
from meshwright.capture.shard.settle import Settled, settle
from meshwright.capture.shard.sizes import Shape, example_sizes, sizes_for
from meshwright.capture.shard.woven_layer import Weights, WovenLayer, halved_layer, woven_layers
from meshwright.capture.trace.graph import Flat
from meshwright.costs.modes import mode
from meshwright.costs.scheme import Grid, Save, Scheme, TensorRequest
from meshwright.errors import MeshwrightError
from meshwright.tensor.wires import Wires


@dataclass(frozen=True)
class ShardPlan:
    """A model under a mode, for batches of one shape."""

    line: Line
    ties: Mapping[str, str]
    frozen: frozenset[str]
    scheme: Scheme
    grid: Grid
    replicate: tuple[str, ...]
    settled: Settled

    def resized(self, columns: Mapping[str, Shape], places: Sequence[int] | None = None) -> ShardPlan:
        """The same for a batch of other shapes, or for layers at other places."""
        found = settle(
            self.line,
            self.ties,
            self.scheme,
            self.grid,
            sizes=sizes_for(self.line.flat, columns),
            places=self.settled.places if places is None else places,
            replicate=self.replicate,
            frozen=self.frozen,
        )
        if places is None and found.cuts != self.settled.cuts:
            raise MeshwrightError(
                "a batch of this shape would cut the parameters of the model in another way", fix="batches of one shape"
            )
        return replace(self, settled=found)

    def halves(self, columns: Mapping[str, Shape]) -> tuple[Settled, Settled] | None:
        """The two halves of a microbatch; None where its rows cannot be cut in two, and it runs in one."""
        rows = half_rows(next(iter(columns.values()))[0], self.scheme, self.grid)
        if rows is None:
            return None
        shapes = [{name: (count, *shape[1:]) for name, shape in columns.items()} for count in rows]
        first, second = (self.resized(shape).settled for shape in shapes)
        return first, second

    def layers(self, states: States, wires: Wires, device: torch.device | None = None) -> list[WovenLayer]:
        """The layers of this rank."""
        return woven_layers(self.settled, states, wires, device)

    def overlapped(self, columns: Mapping[str, Shape], states: States, wires: Wires, weigh: Weights | None = None) -> WovenLayer:
        """The whole range as one layer whose halves take turns; in one where a microbatch cannot be halved."""
        halves = self.halves(columns)
        if halves is None or len(self.settled.programs) != 1:
            return self.layers(states, wires)[0]
        return halved_layer(self.settled, halves, states, wires, weigh=weigh)


def half_rows(rows: int, scheme: Scheme, grid: Grid) -> tuple[int, int] | None:
    """So many rows in two parts that divide by what cuts rows, the first not the smaller; None where that cannot be."""
    fixed = tuple(axis for axis in scheme.residual.rows if axis not in scheme.movable)
    unit = _least_common(grid.size(fixed), grid.size(scheme.inner.rows))
    count = rows // unit
    if rows % unit or count < 2:
        return None
    first = (count + 1) // 2 * unit
    return first, rows - first


def _least_common(a: int, b: int) -> int:
    x, y = a, b
    while y:
        x, y = y, x % y
    return a * b // x


def shard_plan(
    model: nn.Module,
    flat: Flat,
    name: str,
    asked: TensorRequest,
    *,
    save: Save = Save.SHARDS,
    places: Sequence[int] | None = None,
    replicate: Sequence[str] = (),
    frozen: Collection[str] | None = None,
) -> ShardPlan:
    """Settle a captured model under a mode.

    Args:
        model: The model, on any device and on meta; only names, ties and `requires_grad` are read.
        flat: Its captured graph.
        name: `line`, `grid`, `tesseract` or `box`.
        asked: The ranks of the mode.
        save: What products keep for the backward pass.
        places: Where layers begin and end; one layer if not given.
        replicate: Modules that run whole on every rank.
        frozen: Parameters that need no gradient; those of the model if not given.

    Raises:
        MeshwrightError: The mode cannot have these ranks, a size does not divide, or an operation has no rule.
    """
    states = States(model)
    ties = {each: states.first[parameter] for each, parameter in states.parameters.items()}
    if frozen is None:
        frozen = {first for parameter, first in states.first.items() if not parameter.requires_grad}
    grid = mode(name).grid(asked)
    scheme = mode(name).scheme(grid, save=save)
    line = line_of(model, flat)
    sizes = example_sizes(flat)
    found = settle(line, ties, scheme, grid, sizes=sizes, places=places, replicate=replicate, frozen=frozen)
    return ShardPlan(line, ties, frozenset(frozen), scheme, grid, tuple(replicate), found)
