"""What a backward will need, in bytes: measured by running one microbatch through the layers, one after another.

Counted is what autograd saves, each piece of memory once and without weights, and what the run itself keeps: the input of a
stage, and of the first layer that is not recomputed. Weights that are not there are stood in for by zeros, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.runtime.stage.batch import Batch, Cut
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import Objective
from meshwright.runtime.stage.precision import Precision
from meshwright.runtime.stage.stage import Record, Stage, changes_in_place, leaves


@dataclass(frozen=True)
class Kept:
    """`bytes[r]` are kept of a stage for one microbatch when its first r layers are recomputed; `output` goes to the next."""

    bytes: tuple[float, ...]
    output: float


@dataclass(frozen=True, slots=True)
class _Saved:
    """One layer: what it saves besides its input; how large its input and output are, and whether it saves them."""

    own: int
    input: int
    saves_input: bool
    output: int
    saves_output: bool


def saved_bytes(
    layers: Layers, batch: Batch, *, objective: Objective | None = None, precision: Precision | None = None
) -> tuple[Kept, ...]:
    """For each stage what it keeps of a microbatch of this batch, its largest."""
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
        stage.untouched.add(0)  # no copy of the input for a first look
        values, one = _measured(stage, record)
        found.append(one)
    torch.set_rng_state(state)
    return tuple(
        _kept(found[a:b], first=a == 0, inplace=changes_in_place(layers.modules[a:b])) for a, b in pairwise(layers.starts)
    )


def _kept(layers: list[_Saved], *, first: bool, inplace: bool) -> Kept:
    """Between two layers there is one tensor, saved by one, both or none; in front of what is kept it always is."""
    kept = []
    for dropped in range(len(layers)):
        front = layers[dropped]
        size = front.own + (0 if first and not dropped and not front.saves_input else front.input)
        size += front.input if inplace and front.saves_input else 0  # a copy is kept, and another one changed
        for before, layer in pairwise(layers[dropped:]):
            size += layer.own + (layer.input if layer.saves_input and not before.saves_output else 0)
        kept.append(float(size))
    # A front may be larger than the layer before it: then dropping that layer alone gains nothing.
    falling = [*accumulate(reversed([*kept, 0.0]), max)]
    return Kept(tuple(reversed(falling)), float(layers[-1].output))


def _stand_in(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's weights and buffers, or zeros of their shapes; buffers are copies, which a forward may change."""
    found: dict[str, Tensor] = {}
    for name, p in layer.named_parameters(remove_duplicate=False):
        value = torch.zeros_like(p, device="cpu") if p.is_meta else p.detach()
        found[name] = value.requires_grad_(p.requires_grad)
    for name, b in layer.named_buffers(remove_duplicate=False):
        found[name] = torch.zeros_like(b, device="cpu") if b.is_meta else b.clone()
    return found


def _measured(stage: Stage, record: Record) -> tuple[tuple[Tensor, ...], _Saved]:
    """Run a layer; the tensors that it gives on, and what it saves."""
    record.inputs = leaves(record.inputs, [t.is_floating_point() and stage.first_layer > 0 for t in record.inputs])
    given = record.weights[0] if record.weights else {}
    weights = {t.untyped_storage().data_ptr() for t in given.values()}
    inputs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in record.inputs}
    saved: dict[int, tuple[int, Any]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes(), storage  # held, so that no other gets its place
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        bundle = stage.forward(record)
    outputs = {t.untyped_storage().data_ptr() for t in bundle.tensors}
    output = sum(t.numel() * t.element_size() for t in bundle.tensors)
    own = sum(size for place, (size, _) in saved.items() if place not in inputs)
    saves_input, saves_output = (any(place in saved for place in of) for of in (inputs, outputs - set(inputs)))
    return bundle.tensors, _Saved(own, sum(inputs.values()), saves_input, output, saves_output)
