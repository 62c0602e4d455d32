"""Captured layers on whole parameters, on a rank that holds only parts of them.

A tensor mode cuts rows, sequences and features, so their sizes must divide by the sides of a box. Training refuses sizes that do
not. Evaluation and generation take any size: such a batch runs on whole layers. Each layer gathers its parameters, runs as it
would in one process, the same on all ranks of the box, and frees them again. The graph of the model in evaluation mode runs in
the same way if it differs from the graph in training mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.tensor_parameters import TensorParameters


class WholeLayer(nn.Module):
    """A captured layer that gathers its parameters for every call. Without gradients."""

    takes_made_again = True

    def __init__(self, layer: Any, tensor: TensorParameters) -> None:
        super().__init__()
        self.layer, self.tensor = layer, tensor
        self.batch_columns: tuple[str, ...] = layer.batch_columns
        self.inplace: bool = layer.inplace

    def forward(self, *values: Tensor, made_again: dict[int, Any] | None = None, **columns: Tensor) -> tuple[Tensor, ...]:
        """Runs the layer. All ranks of the box call this together."""
        gathered: dict[int, Tensor | None] = {}
        weights: dict[str, Any] = {}
        for name, parameter in self.layer.named_parameters(remove_duplicate=False):
            if id(parameter) not in gathered:
                gathered[id(parameter)] = self.tensor.whole(parameter, parameter)
            weights[name] = gathered[id(parameter)]
        named = {"made_again": made_again, **columns}
        result: tuple[Tensor, ...] = functional_call(self.layer, weights, values, named, tie_weights=False)
        return result


@dataclass(frozen=True)
class WholeAgain:
    """Captures a model again for other sizes, for layers on whole parameters."""

    layers: Layers
    tensor: TensorParameters

    def __call__(self, given: Mapping[str, Tensor]) -> Layers:
        """Returns the layers for columns of these sizes."""
        assert self.layers.again is not None
        with whole_shapes(self.tensor):
            return whole_layers(self.layers.again(given), self.tensor)


def whole_layers(layers: Layers, tensor: TensorParameters) -> Layers:
    """Returns plain captured layers as layers that gather their parameters."""
    again = None if layers.again is None else WholeAgain(layers, tensor)
    return replace(layers, modules=tuple(WholeLayer(layer, tensor) for layer in layers.modules), again=again, evaluation=None)


@contextmanager
def whole_shapes(tensor: TensorParameters) -> Iterator[None]:
    """While it is entered, parameters that this rank holds in parts have the shapes of whole parameters, and no values."""
    parts = {p: (p.data, p.grad) for p, cut in tensor.cuts.items() if tuple(p.shape) != cut.shape}
    try:
        for parameter in parts:
            parameter.grad = None
            parameter.data = _hollow(tensor.cuts[parameter].shape, parameter)
        yield
    finally:
        for parameter, (data, grad) in parts.items():
            parameter.data, parameter.grad = data, grad


def _hollow(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns a tensor of this shape without memory."""
    found = torch.empty(shape, dtype=like.dtype, device=like.device)
    found.untyped_storage().resize_(0)
    return found
