"""Opens a cut model under a tensor mode on one rank: layers with local sizes, and where each parameter is cut.

tensor = TensorCut(grid, scheme)
settled = settled_for(model, flat, cuts, tensor)          data, made once, sent to all ranks
split = open_settled(model, settled, cuts, wires)         modules on a rank; their parameters are still whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from meshwright.capture.cut.loss_weight import weigher
from meshwright.capture.cut.stage_modules import Captured, States
from meshwright.capture.model_graph import line_of
from meshwright.capture.shard.emit import shard_layers
from meshwright.capture.shard.layout import axes_of
from meshwright.capture.shard.settle import Settled, settle
from meshwright.capture.shard.sizes import example_sizes, sizes_for
from meshwright.capture.shard.steps import ParameterCut
from meshwright.capture.split import ChosenCuts, Split
from meshwright.capture.trace.graph import Flat
from meshwright.costs.scheme import Grid, Scheme
from meshwright.tensor.wires import Wires

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorCut:
    """How a model is sharded."""

    grid: Grid
    scheme: Scheme
    replicate: tuple[str, ...] = ()
    """Modules whose parameters stay whole."""


def settled_for(
    model: nn.Module,
    flat: Flat,
    cuts: ChosenCuts,
    tensor: TensorCut,
    shapes: Shapes | None = None,
    *,
    whole_outputs: bool = False,
) -> Settled:
    """Settles the layouts of a model for batches of these shapes; those of the example if not given."""
    states = States(model)
    first = {name: states.first[parameter] for name, parameter in states.parameters.items()}
    return settle(
        line_of(model, flat),
        first,
        tensor.scheme,
        tensor.grid,
        sizes=example_sizes(flat) if shapes is None else sizes_for(flat, shapes),
        places=cuts.places,
        replicate=tensor.replicate,
        frozen=[name for parameter, name in states.first.items() if not parameter.requires_grad],
        whole_outputs=whole_outputs,
    )


def open_settled(model: nn.Module, settled: Settled, cuts: ChosenCuts, wires: Wires, device: torch.device | None = None) -> Split:
    """Makes the modules of a settled model on one rank, stage by stage."""
    states, modules = States(model), list[Captured]()
    for first, last in pairwise(cuts.starts):
        part = replace(settled, places=settled.places[first : last + 1], programs=settled.programs[first:last])
        modules += shard_layers(part, states, wires, device)
    for module in modules:
        module.train(model.training)
    return Split(tuple(modules), states.first, weigher(settled.line, states, device), settled.line.flat, cuts)


def counted_here(cut: ParameterCut, wires: Wires) -> bool:
    """True on one rank of those that hold equal parts of a parameter: it counts the part in a norm."""
    axes = axes_of(cut.layout)
    return all(at == 0 for axis, at in wires.at.items() if axis not in axes)
