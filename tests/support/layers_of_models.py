"""The layers of a model in one call, for tests that need no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.runtime.stage.layers import Layers
from meshwright.train.setup.captured_layers import cut_graph, is_captured, listed_layers


def layers_for(
    built: Any,
    example_batch: Any,
    stages: int,
    *,
    cuts: Sequence[str | int] | None = None,
    flat: Flat | None = None,
    device: torch.device | None = None,
    own_loss: bool = False,
    evaluated: Flat | None = None,
) -> Layers:
    """Returns the layers of a model, cut into stages. With a loss function of the user it is captured without labels.

    `evaluated` is the graph of the model in evaluation mode, if it differs from the graph in training mode.
    """
    if not is_captured(built):
        return listed_layers(built, stages, cuts)
    flat = flat or flatten(built, example_batch, own_loss=own_loss)
    return cut_graph(built, example_batch, flat, stages, at=cuts, own_loss=own_loss, evaluated=evaluated).open(built, device)
