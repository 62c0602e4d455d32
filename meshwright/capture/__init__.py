"""Turns an ordinary model into pipeline stages: traces it, finds where it can be cut, and loads weights where they are needed.

    model_graph    `capture`: a model as a chain of layers with costs, as plain data
    split          cuts a captured model into stages of modules
    trace/         model -> flat graph of operations, with torch.export
    cut/           flat graph -> layers, their costs, cut points, stage modules
    repeat/        many equal blocks -> flat graph, from a few of them, for costs
    shard/         flat graph -> what one rank runs under a tensor mode
    check/         captured layers against the model, before training starts
    weights/       models without weights, and weights for chosen parameters

The package itself can be called: `meshwright.capture(model, example_batch)` returns the `ModelGraph` of the model.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from meshwright.ir.model import ModelGraph


class _Callable(ModuleType):
    """A package that can be called."""

    def __call__(self, model: nn.Module, example_batch: Any) -> ModelGraph:
        """The chain of layers of a model, on any device and on meta."""
        from meshwright.capture.model_graph import capture

        return capture(model, example_batch)


sys.modules[__name__].__class__ = _Callable
