"""Cuts a model into stages: a chain of modules, the first module of each stage, and what a run needs to know about them.

cuts = choose_cuts(model, flat, 4)      data, chosen once
found = open_cuts(model, flat, cuts)    the modules use the model's own parameters
found.starts                            (0, 5, 9, 13, 18): the first module of each stage, then the number of modules
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.cut.label_counter import LabelCounter, label_counter
from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import Captured, States, stage
from meshwright.capture.model_graph import graph_of, line_of
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat, Node, NodeKind
from meshwright.errors import MeshwrightError
from meshwright.ir.model import ModelGraph


@dataclass(frozen=True)
class ChosenCuts:
    """Where a graph is cut, as data. It is chosen once and opened on every rank (`open_cuts`)."""

    places: tuple[int, ...]
    """The first operation of each layer, then the number of operations."""
    starts: tuple[int, ...]
    """The first layer of each stage, then the number of layers."""
    graph: ModelGraph
    flops: tuple[float, ...]
    """Floating-point operations of the forward of each stage."""


@dataclass(frozen=True)
class Split:
    """The layers of a captured model. `names` are the model's own names; a tied parameter has its first name."""

    modules: tuple[Captured, ...]
    names: dict[nn.Parameter, str]
    weigh: LabelCounter | None
    flat: Flat
    cuts: ChosenCuts

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each stage, then the number of layers."""
        return self.cuts.starts

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the last layer: the loss first, then the scores if the model returns any."""
        return self.flat.outputs


def split(
    model: nn.Module,
    example_batch: Any,
    stages: int,
    *,
    cuts: Sequence[str | int] | None = None,
    flat: Flat | None = None,
    device: torch.device | None = None,
) -> Split:
    """Capture a model, choose its cuts and open them. `flat` is a graph that was captured before from an equal model."""
    flat = flat or flatten(model, example_batch)
    return open_cuts(model, flat, choose_cuts(model, flat, stages, at=cuts), device)


def choose_cuts(model: nn.Module, flat: Flat, stages: int, *, at: Sequence[str | int] | None = None) -> ChosenCuts:
    """Choose where stages begin: balanced by operations and bytes, or at the modules named in `at`."""
    line = line_of(model, flat)
    places = LayerChain(line).starts
    graph = graph_of(model, line, places)
    found = graph.cuts(stages, at=at)
    _refuse_far_buffers(line, [places[start] for start in found.starts])
    return ChosenCuts(places, found.starts, graph, tuple(part.flops for part in found.parts))


def open_cuts(model: nn.Module, flat: Flat, cuts: ChosenCuts, device: torch.device | None = None) -> Split:
    """Make the modules of a cut graph. They use the parameters of this model."""
    line, states = line_of(model, flat), States(model)
    runs = [cuts.places[a : b + 1] for a, b in itertools.pairwise(cuts.starts)]
    modules = tuple(module for run in runs for module in stage(line, run, states, device))
    for module in modules:
        module.train(model.training)
    return Split(modules, states.first, label_counter(line, states, device), flat, cuts)


def cuts_like(first: ChosenCuts, model: nn.Module, flat: Flat) -> ChosenCuts:
    """Cut another graph of the same model at the same modules as the first one."""
    line = line_of(model, flat)
    graph = graph_of(model, line, LayerChain(line).starts)
    at = [_same_place(first.graph, start, graph) for start in first.starts[1:-1]]
    return choose_cuts(model, flat, len(first.starts) - 1, at=at)


def split_like(first: Split, model: nn.Module, flat: Flat, device: torch.device | None = None) -> Split:
    """Cut another graph of the same model at the same modules as the first one, and open it. Stages keep their parameters."""
    return open_like(first, model, flat, cuts_like(first.cuts, model, flat), device)


def open_like(first: Split, model: nn.Module, flat: Flat, cuts: ChosenCuts, device: torch.device | None = None) -> Split:
    """Open another graph of a model that is already open. Raises if a parameter is on another stage than in the first graph."""
    found = open_cuts(model, flat, cuts, device)
    ranges = zip(itertools.pairwise(first.starts), itertools.pairwise(found.starts), strict=True)
    for number, ((a, b), (c, d)) in enumerate(ranges):
        mine = {p for module in first.modules[a:b] for p in module.parameters()}
        for parameter in (p for module in found.modules[c:d] for p in module.parameters()):
            if parameter not in mine:
                raise MeshwrightError(
                    f"{found.names[parameter]} moves to stage {number} in another graph of the model, but stages cannot change",
                    fix="use batches of one size, or other cuts (stages=[...] in the plan)",
                )
    return found


def _refuse_far_buffers(line: Line, starts: Sequence[int]) -> None:
    """Raise if two stages use a buffer that the forward changes: a change on one worker is not visible on another."""
    for name in sorted(line.state - line.parameters):
        users = [i for i, node in enumerate(line.work) if name in node.changes or name in _states_read(line, node)]
        stages = sorted({bisect_right(starts, i) - 1 for i in users})
        if len(stages) > 1:
            raise MeshwrightError(
                f"the forward changes the buffer {name!r}, and stages {stages[0]} and {stages[-1]} both use it: a change on one "
                "worker is not seen on another",
                fix="choose cuts that keep its users in one stage (stages=[...] in the plan), or use fewer stages",
            )


def _states_read(line: Line, node: Node) -> set[str]:
    nodes = [line.flat.by_name[name] for name in (*node.reads, *line.closure([node.name]))]
    return {n.target for n in nodes if n.kind is NodeKind.STATE}


def _same_place(first: ModelGraph, start: int, other: ModelGraph) -> int:
    """Find the layer of another graph that begins at the same module as a layer of the first graph."""
    wanted = first.layers[start]
    for index, layer in enumerate(other.layers):
        if layer.modules == wanted.modules and (wanted.modules or layer.name == wanted.name):
            return index
    for index, layer in enumerate(other.layers):
        if layer.name == wanted.name or set(layer.modules) & set(wanted.modules):
            return index
    raise MeshwrightError(
        f"another graph of the model has no layer that begins with {wanted.name}, where the first one is cut",
        fix="cut at modules (stages=[...] in the plan), or use batches of one size",
    )
