"""Floating-point operations of a training step, for `total_flos`: three times those of the captured forward.

A backward counts as two forwards. This is the usual rule of six operations per parameter and token. Recompute is not counted,
and operations that frozen parameters save are not subtracted. A list of layers is run once on the meta device to count its
matrix products.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.cut.cost import flops
from meshwright.capture.model_graph import line_of
from meshwright.capture.trace.graph import Flat, NodeKind
from meshwright.runtime.stage.batch import Given
from meshwright.train.session.speed import TOKENS, Amount, Speed, amount

PASSES = 3
"""One forward, plus one backward that counts as two."""


def speed_of(model: nn.Module, flat: Flat | None, example: Given) -> Speed:
    """Returns the speed counter of a run, with the operations per row and per token.

    If `flat` is None, `model` is a list of layers.
    """
    if flat is not None:
        line = line_of(model, flat)
        forward, size = sum(flops(line, node) for node in line.work), _size(flat)
    else:
        forward, size = _run(list(cast(Any, model)), example), amount(example)
    work = PASSES * forward
    return Speed(work / size.rows if size.rows else 0.0, work / size.tokens if size.tokens else 0.0)


def _size(flat: Flat) -> Amount:
    """Returns the number of rows and tokens that a graph was captured with."""
    found = {n.target: torch.empty(n.size.shape, dtype=getattr(torch, n.size.dtype), device="meta")
             for n in flat.nodes if n.kind is NodeKind.COLUMN and n.size is not None}  # fmt: skip
    return amount({TOKENS: found[TOKENS]} if TOKENS in found else found) if found else Amount()


def _run(layers: list[Any], example: Given) -> float:
    """Counts the operations of layers that are called one after another.

    Returns 0 if a layer needs real values, or more inputs than the outputs of the layer before it.
    """
    if not isinstance(example, tuple | list):
        return 0.0
    values: Any = (example[0].to("meta"),)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        try:
            for layer in layers:
                state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
                found = functional_call(layer, {name: t.to("meta") for name, t in state.items()}, values)
                values = (found,) if isinstance(found, Tensor) else tuple(found)
        except Exception:  # a layer may raise anything on the meta device; its cost is then unknown
            return 0.0
    return float(counter.get_total_flops())
