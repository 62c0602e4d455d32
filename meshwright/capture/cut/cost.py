"""Costs of layers: FLOPs from the shapes of matrix products and attention, bytes from what autograd would save.

FLOPs are those of a forward, with two per multiply-add; every other operation counts one per element. To find what a backward
needs, the layers run on the meta device, which computes nothing. If an operation cannot run there, every result is assumed to be
saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, UntypedStorage, nn

from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import Captured, States, layer
from meshwright.capture.trace.graph import Node, NodeKind, Size
from meshwright.capture.trace.operations import PRODUCTS, VIEWS, is_one_of


def flops(line: Line, node: Node) -> float:
    """Return the FLOPs of one node."""
    own = node.size.shape if node.size is not None else ()
    if is_one_of(node.target, ("aten.scaled_dot_product_attention",)):
        query, key, value = (_shape(line, name) for name in node.reads[:3])
        return 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if is_one_of(node.target, ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")):
        return 2.0 * prod(own) * prod(_shape(line, node.reads[1])[1:])
    if is_one_of(node.target, ("aten.addmm", "aten.baddbmm")):
        return 2.0 * prod(own) * _shape(line, node.reads[1])[-1]
    if is_one_of(node.target, PRODUCTS) and node.reads and _shape(line, node.reads[0]):
        return 2.0 * prod(own) * _shape(line, node.reads[0])[-1]
    return 0.0 if is_one_of(node.target, VIEWS) else float(prod(own)) if node.size is not None else 0.0


def _shape(line: Line, name: str) -> tuple[int, ...]:
    size = line.flat.by_name[name].size
    return () if size is None else size.shape


def saved(line: Line, places: Sequence[int], model: nn.Module) -> list[int]:
    """Return for each layer the bytes that autograd saves for its backward, without parameters."""
    try:
        return _measured(line, places, model)
    except Exception:  # an operation that needs values cannot run on the meta device
        return [sum(_bytes(node.size) for node in line.work[a:b]) for a, b in itertools.pairwise(places)]


def _bytes(size: Size | None) -> int:
    return 0 if size is None else size.bytes


def _measured(line: Line, places: Sequence[int], model: nn.Module) -> list[int]:
    meta = torch.device("meta")
    states = _meta_states(model)
    columns = {n.target: _meta(n, line) for n in line.flat.nodes if n.kind is NodeKind.COLUMN}
    values: tuple[Tensor, ...] = ()
    found = []
    for first, last in itertools.pairwise(places):
        module = layer(line, first, last, states, meta)
        total, values = _run(module, values, {name: columns[name] for name in module.batch_columns})
        found.append(total)
        values = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in values)
    return found


def _run(module: Captured, values: tuple[Tensor, ...], columns: dict[str, Tensor]) -> tuple[int, tuple[Tensor, ...]]:
    weights = [p.untyped_storage() for p in module.parameters()]
    own = set(map(id, weights))
    seen: dict[int, tuple[int, UntypedStorage]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # kept so that its id stays unique; the tensor would keep the whole graph alive
        seen.setdefault(id(storage), (tensor.numel() * tensor.element_size(), storage))
        return tensor

    inputs = tuple(t + 0 for t in values)  # a layer may change its inputs in place
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = module(*inputs, **columns)
    return sum(size for key, (size, _) in seen.items() if key not in own), output


def _meta_states(model: nn.Module) -> States:
    states = States(model)
    twins: dict[int, nn.Parameter] = {}
    for name, parameter in states.parameters.items():
        if id(parameter) not in twins:
            twins[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        states.parameters[name] = twins[id(parameter)]
    states.first = {}
    for name, parameter in states.parameters.items():
        states.first.setdefault(parameter, name)
    states.buffers = {name: buffer.to("meta") for name, buffer in states.buffers.items()}
    return states


def _meta(node: Node, line: Line) -> Tensor:
    assert node.size is not None
    return torch.empty(node.size.shape, dtype=getattr(torch, node.size.dtype), device="meta")
