"""Measures the bytes that stages keep for their backward, by running one microbatch through the layers.

The count includes the tensors that autograd saves, each storage once and without weights. It also includes what the engine
keeps: the input of a stage, and the input of the first layer that is not recomputed. Missing weights are replaced by zeros,
layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.runtime.stage.batch import Batch, Cut
from meshwright.runtime.stage.layer_inputs import changes_in_place
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import Objective
from meshwright.runtime.stage.precision import Precision
from meshwright.runtime.stage.stage import Record, Stage, leaves


@dataclass(frozen=True)
class KeptBytes:
    """The bytes of one stage and one microbatch.

    `bytes[r]` are the bytes that the stage keeps if its first r layers are recomputed. `output` is the size of its output.
    """

    bytes: tuple[float, ...]
    output: float


@dataclass(frozen=True, slots=True)
class _Saved:
    """The bytes of one layer: what it saves except its input, the sizes of its input and output, and whether it saves them."""

    own: int
    input: int
    saves_input: bool
    output: int
    saves_output: bool


def saved_bytes(
    layers: Layers, batch: Batch, *, objective: Objective | None = None, precision: Precision | None = None
) -> tuple[KeptBytes, ...]:
    """Returns the bytes that each stage keeps for the largest microbatch of this batch."""
    rows = max(batch.cuts, key=lambda rows: rows.stop - rows.start)
    values, named = batch.inputs(rows)
    objective = objective or Objective(weigh=layers.weigh)
    found: list[_Saved] = []
    state = torch.get_rng_state()
    for index, layer in enumerate(layers.modules):
        last = index == len(layers.modules) - 1
        stage = Stage([layer], index, torch.device("cpu"), is_last=last, objective=objective, precision=precision or Precision())
        record = Record(Cut(rows, items=1.0, counts=1.0, stream=0), values)
        record.named, record.target = named if index == 0 else {}, batch.targets(rows) if last else None
        record.weights, record.columns = [_stand_in(layer)], batch.named(stage.columns, rows)
        stage.untouched.add(0)  # do not copy the input to detect in-place changes
        values, one = _measured(stage, record)
        found.append(one)
    torch.set_rng_state(state)
    return tuple(
        _kept(found[a:b], first=a == 0, inplace=changes_in_place(layers.modules[a:b])) for a, b in pairwise(layers.starts)
    )


def _kept(layers: list[_Saved], *, first: bool, inplace: bool) -> KeptBytes:
    """Adds up the bytes of the layers of a stage, for each number of recomputed layers.

    The tensor between two layers may be saved by one of them, by both, or by none, and counts once. The input of the first layer
    that is not recomputed is always kept.
    """
    kept = []
    for dropped in range(len(layers)):
        front = layers[dropped]
        size = front.own + (0 if first and not dropped and not front.saves_input else front.input)
        size += front.input if inplace and front.saves_input else 0  # one copy is kept, another is changed in place
        for before, layer in pairwise(layers[dropped:]):
            size += layer.own + (layer.input if layer.saves_input and not before.saves_output else 0)
        kept.append(float(size))
    # The input of a layer may be larger than what the layer before it saves: recomputing only that layer then gains nothing.
    falling = [*accumulate(reversed([*kept, 0.0]), max)]
    return KeptBytes(tuple(reversed(falling)), float(layers[-1].output))


def _stand_in(layer: nn.Module) -> dict[str, Tensor]:
    """Returns a layer's weights and buffers, or zeros for meta tensors. Buffers are copied, because a forward may change them."""
    found: dict[str, Tensor] = {}
    for name, p in layer.named_parameters(remove_duplicate=False):
        value = torch.zeros_like(p, device="cpu") if p.is_meta else p.detach()
        found[name] = value.requires_grad_(p.requires_grad)
    for name, b in layer.named_buffers(remove_duplicate=False):
        found[name] = torch.zeros_like(b, device="cpu") if b.is_meta else b.clone()
    return found


def _measured(stage: Stage, record: Record) -> tuple[tuple[Tensor, ...], _Saved]:
    """Runs a layer. Returns its output tensors and the bytes that it saves."""
    record.inputs = leaves(record.inputs, [t.is_floating_point() and stage.first_layer > 0 for t in record.inputs])
    given = record.weights[0] if record.weights else {}
    weights = {t.untyped_storage().data_ptr() for t in given.values()}
    inputs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in record.inputs}
    saved: dict[int, tuple[int, Any]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes(), storage  # a reference, so that its address is not used again
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        bundle = stage.forward(record)
    outputs = {t.untyped_storage().data_ptr() for t in bundle.tensors}
    output = sum(t.numel() * t.element_size() for t in bundle.tensors)
    own = sum(size for place, (size, _) in saved.items() if place not in inputs)
    saves_input, saves_output = (any(place in saved for place in of) for of in (inputs, outputs - set(inputs)))
    return bundle.tensors, _Saved(own, sum(inputs.values()), saves_input, output, saves_output)
