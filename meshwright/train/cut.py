"""A user's model as layers in a chain: a list of modules as it is, any other model captured and split."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.ir.plan import Parallel
from meshwright.runtime.batch import Given
from meshwright.runtime.layers import Layers
from meshwright.train.lists import stages_of


def layers_for(model: Any, example: Given, parallel: Parallel) -> Layers:
    """The layers of a model and where the stages of a plan begin."""
    stages = stages_of(parallel)
    if isinstance(model, nn.Sequential | nn.ModuleList | list | tuple):
        return Layers.of(model, stages)
    return Layers((Whole(model),), (0, 1))


class Whole(nn.Module):
    """tmp"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Any = None, **named: Any) -> Any:
        """tmp"""
        return self.model(**named, labels=labels)
