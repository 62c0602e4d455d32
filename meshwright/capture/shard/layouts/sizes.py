"""The sizes of a flat graph for one batch: the shape of every tensor, the value of every number, and the dimension with rows.

A flat graph has the sizes of its example. Sizes of other batches are computed on tensors without data. So is the dimension that
has the rows of the batch: it is the dimension that grows with the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.cut.liveness import Line
from meshwright.capture.trace.autograd_functions import FUNCTION, Function
from meshwright.capture.trace.graph import Flat, Node, NodeKind, Ref, mapped
from meshwright.capture.trace.operations import CHECKS, function_of, is_one_of
from meshwright.torch_internals import without_values

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Shapes of tensors and values of numbers by the names of nodes; `grows` has the dimension with rows, if any."""

    shapes: dict[str, Shape]
    numbers: dict[str, Any]
    grows: dict[str, int]
    rows: int
    unknown: dict[str, str] = field(default_factory=dict)
    """Values whose sizes depend on the data of a batch, and why."""


def example_sizes(flat: Flat) -> Sizes:
    """Returns the sizes of the batch that the graph was captured with."""
    shapes = {node.target: node.size.shape for node in flat.nodes if node.kind is NodeKind.COLUMN and node.size is not None}
    return sizes_for(flat, shapes)


def sizes_for(flat: Flat, columns: Mapping[str, Shape]) -> Sizes:
    """Returns the sizes for a batch with columns of these shapes."""
    first, numbers, unknown = _run(flat, columns)
    rows = next(iter(columns.values()))[0]
    more, _, _ = _run(flat, {name: (2 * shape[0], *shape[1:]) for name, shape in columns.items()})
    grows = {name: dim for name, shape in first.items() if (dim := _grown(shape, more.get(name, ()))) is not None}
    return Sizes(first, numbers, grows, rows, unknown)


def _grown(shape: Shape, more: Shape) -> int | None:
    found = [dim for dim, (a, b) in enumerate(zip(shape, more, strict=False)) if a != b]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A placeholder for a value whose size depends on the data of a batch."""

    why: str


def _run(flat: Flat, columns: Mapping[str, Shape]) -> tuple[dict[str, Shape], dict[str, Any], dict[str, str]]:
    """Runs the nodes that the result of a graph depends on, on tensors without data."""
    values: dict[str, Any] = {}
    alive = Line(flat, frozenset()).alive()
    with torch.no_grad():
        for node in flat.nodes:
            if node.name in alive or node.kind is not NodeKind.CALL:
                values[node.name] = _value(node, columns, values)
    shapes = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float | bool)}
    return shapes, numbers, {name: value.why for name, value in values.items() if isinstance(value, _Unknown)}


def _value(node: Node, columns: Mapping[str, Shape], values: dict[str, Any]) -> Any:
    if node.kind is NodeKind.REGION:
        return node.body
    if node.kind is not NodeKind.CALL:
        assert node.size is not None
        shape = columns.get(node.target, node.size.shape) if node.kind is NodeKind.COLUMN else node.size.shape
        return torch.empty(shape, dtype=getattr(torch, node.size.dtype), device="meta")
    if is_one_of(node.target, CHECKS):
        return None
    args = mapped(node.args, lambda leaf: _leaf(leaf, values))
    kwargs = mapped(dict(node.kwargs), lambda leaf: _leaf(leaf, values))
    if lost := [value for name in node.reads if isinstance(value := values.get(name), _Unknown)]:
        known = node.size is not None and node.size.shape == ()  # a number for all sizes, such as a loss
        return torch.empty((), dtype=getattr(torch, node.size.dtype), device="meta") if node.size and known else lost[0]
    try:
        return _called(node, args, kwargs)
    except Exception as error:  # whatever torch says about tensors without data
        text = str(error).partition("\n")[0]
        return _Unknown(f"the size of {node.target} in {node.path or 'the model'} depends on the values of a batch: {text}")


def _called(node: Node, args: Any, kwargs: Any) -> Any:
    if is_one_of(node.target, ("higher_order",)):
        at = next(k for k, arg in enumerate(args) if isinstance(arg, Flat))
        return _region(args[at], args[at + 1 :])
    if is_one_of(node.target, (FUNCTION,)):
        return _of_function(Function(node.target.removeprefix(f"{FUNCTION}.")), args)
    return function_of(node.target)(*args, **kwargs)


def _of_function(function: Function, args: Any) -> Any:
    """A user's function as on a CPU: it may mix what it is given with constants that it makes there."""

    def on(device: str, leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Tensor) else leaf

    with without_values():
        found = function(*mapped(args, lambda leaf: on("cpu", leaf)))
    return mapped(found, lambda leaf: on("meta", leaf))


def _region(flat: Flat, given: Any) -> Any:
    """Runs the subgraph of a switch. Its columns are its arguments, in order."""
    values: dict[str, Any] = {}
    inputs = iter(given)
    for node in flat.nodes:
        values[node.name] = next(inputs) if node.kind is NodeKind.COLUMN else _value(node, {}, values)
    return mapped(flat.result, lambda leaf: _leaf(leaf, values))


def _leaf(leaf: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(leaf, Ref):
        return values[leaf.name]
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
