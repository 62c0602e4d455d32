"""A model cut into stages: modules in a chain, where each stage begins, and what a run must know besides.

found = split(model, batch, 4)         modules whose parameters are the model's own
found.starts                           (0, 5, 9, 13, 18): the first module of each stage, and their number
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.capture.build import Captured, States, stage
from meshwright.capture.chain import Chain
from meshwright.capture.export import flatten
from meshwright.capture.flat import Flat
from meshwright.capture.graph import graph_of, line_of
from meshwright.capture.weigh import Weigher, weigher
from meshwright.ir.model import ModelGraph


@dataclass(frozen=True)
class Split:
    """Layers of a captured model. `names` are the model's own, the first one for a tied parameter."""

    modules: tuple[Captured, ...]
    starts: tuple[int, ...]
    names: dict[nn.Parameter, str]
    weigh: Weigher | None
    flat: Flat
    graph: ModelGraph

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the last layer returns: the loss first, and scores where the model has them."""
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
    """Cut a model; `flat` is a graph that was captured before, of an equal model."""
    flat = flat or flatten(model, example_batch)
    line = line_of(model, flat)
    places = Chain(line).starts
    graph = graph_of(model, line, places)
    starts = graph.cuts(stages, at=cuts).starts
    states = States(model)
    runs = [places[a : b + 1] for a, b in itertools.pairwise(starts)]
    modules = tuple(module for run in runs for module in stage(line, run, states, device))
    for module in modules:
        module.train(model.training)
    return Split(modules, starts, states.first, weigher(line, states, device), flat, graph)
