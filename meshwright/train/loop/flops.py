"""The operations of a training step, for `total_flos`: those of the captured forward, three times.

A backward counts as two forwards, as in the rule of six operations per parameter and token; recompute is not counted, and
neither is what frozen parameters save. A list of layers is run once without values, and its products are counted.
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
"""A forward, and a backward that counts as two."""


def speed_of(model: nn.Module, flat: Flat | None, example: Given) -> Speed:
    """The clock of a run, with the operations of one row and of one token; without a graph, `model` is a list of layers."""
    if flat is not None:
        line = line_of(model, flat)
        forward, size = sum(flops(line, node) for node in line.work), _size(flat)
    else:
        forward, size = _run(list(cast(Any, model)), example), amount(example)
    work = PASSES * forward
    return Speed(work / size.rows if size.rows else 0.0, work / size.tokens if size.tokens else 0.0)


def _size(flat: Flat) -> Amount:
    """The rows and tokens that a graph was captured with."""
    found = {n.target: torch.empty(n.size.shape, dtype=getattr(torch, n.size.dtype), device="meta")
             for n in flat.nodes if n.kind is NodeKind.COLUMN and n.size is not None}  # fmt: skip
    return amount({TOKENS: found[TOKENS]} if TOKENS in found else found) if found else Amount()


def _run(layers: list[Any], example: Given) -> float:
    """The products of layers that are called one after another; 0 where that needs values, or more than the values before."""
    if not isinstance(example, tuple | list):
        return 0.0
    values: Any = (example[0].to("meta"),)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        try:
            for layer in layers:
                state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
                found = functional_call(layer, {name: t.to("meta") for name, t in state.items()}, values)
                values = (found,) if isinstance(found, Tensor) else tuple(found)
        except Exception:  # a layer may do anything: then nothing is known of it
            return 0.0
    return float(counter.get_total_flops())
