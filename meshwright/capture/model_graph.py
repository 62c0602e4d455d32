"""`capture`: describes the layers of a model as plain data, without weights, for planners and for people."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright.capture.cut.cost import flops, saved
from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import needed
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat, NodeKind
from meshwright.capture.trace.operations import LOOKUPS, PRODUCTS, is_one_of
from meshwright.ir.model import Crossing, Layer, ModelGraph, Weight


def capture(model: nn.Module, example_batch: Any, *, flat: Flat | None = None) -> ModelGraph:
    """The chain of layers of a model, as data.

    In Python this is `meshwright.capture(model, example_batch)`.

    Args:
        model: A module on any device. On `meta` it needs no memory for weights.
        example_batch: A batch with at least two rows: a mapping of columns, or a tuple of tensors.
        flat: The captured graph of the model, if it exists already.

    Returns:
        The layers with their operations, bytes, ties and skips.

    Raises:
        MeshwrightError: The model cannot be captured; the message names the line that prevents it.

    Examples:
        >>> import torch
        >>> import meshwright as mw
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        ...     def forward(self, x):
        ...         return self.last(self.first(x).relu()).sum()
        >>> graph = mw.capture(Model(), (torch.zeros(2, 8),))
        >>> sorted(weight.name for weight in graph.weights)
        ['first.bias', 'first.weight', 'last.bias', 'last.weight']
    """
    flat = flat or flatten(model, example_batch)
    line = line_of(model, flat)
    return graph_of(model, line, LayerChain(line).starts)


def line_of(model: nn.Module, flat: Flat) -> Line:
    """Return the operations of a flat graph in order, together with the names of the model's parameters."""
    return Line(flat, frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)))


def graph_of(model: nn.Module, line: Line, places: tuple[int, ...]) -> ModelGraph:
    """Compute what the layers between these places cost."""
    first: dict[nn.Parameter, str] = {}
    every = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in every.items():
        first.setdefault(parameter, name)
    made = {node.name: k for k, (a, b) in enumerate(itertools.pairwise(places)) for node in line.work[a:b]}
    kept, spans = saved(line, places, model), _spans(line)
    layers, begun, taken = [], set[str](), set[str]()
    for k, (a, b) in enumerate(itertools.pairwise(places)):
        names = _parameters(line, a, b)
        own = tuple(dict.fromkeys(first[every[name]] for name in names))
        sizes = {first[every[name]]: every[name] for name in names}
        layers.append(
            Layer(
                name=_name(line, a, b, spans, taken),
                flops=sum(flops(line, node) for node in line.work[a:b]),
                parameters=own,
                parameter_bytes=sum(p.numel() * p.element_size() for p in sizes.values()),
                output=tuple(_crossing(line, name, made) for name in line.crossings[b]) if b < len(line.work) else (),
                saved_bytes=kept[k],
                columns=_columns(line, a, b),
                modules=_modules(line, a, b, begun),
            )
        )
    used = {name for at in layers for name in at.parameters}
    weights = tuple(Weight(name, tuple(p.shape), p.numel() * p.element_size()) for p, name in first.items() if name in used)
    return ModelGraph(type(model).__name__, tuple(layers), weights)


def parameter_bytes(model: nn.Module, line: Line, places: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of the parameters that each layer between these places reads."""
    every = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for first, last in itertools.pairwise(places):
        read = {id(every[name]): every[name] for name in _parameters(line, first, last)}
        found.append(sum(p.numel() * p.element_size() for p in read.values()))
    return tuple(found)


def _crossing(line: Line, name: str, made: dict[str, int]) -> Crossing:
    size = line.flat.by_name[name].size
    assert size is not None, "only tensors cross"
    return Crossing(name, size.shape, size.bytes, made[name])


def _parameters(line: Line, first: int, last: int) -> tuple[str, ...]:
    """Return the parameters that a layer reads, by their names in the graph."""
    by_name = line.flat.by_name
    reads = [name for node in line.work[first:last] for name in node.reads]
    names = [by_name[name].target for name in reads if by_name[name].kind is NodeKind.STATE]
    return tuple(dict.fromkeys(name for name in names if name in line.parameters))


def _columns(line: Line, first: int, last: int) -> tuple[str, ...]:
    wanted = needed(line, [node.name for node in line.work[first:last]])
    return tuple(line.flat.by_name[name].target for name in wanted if line.flat.by_name[name].kind is NodeKind.COLUMN)


def _modules(line: Line, first: int, last: int, begun: set[str]) -> tuple[str, ...]:
    """Return the modules whose first operation is also the first operation of the layer, outermost first."""
    found = []
    for index, node in enumerate(line.work[first:last]):
        parts = node.path.split(".") if node.path else []
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in begun:
                begun.add(name)
                if index == 0:
                    found.append(name)
    return tuple(found)


def _spans(line: Line) -> dict[str, tuple[int, int]]:
    """Return the first and the last operation of every module."""
    found: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(line.work):
        parts = node.path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            found[name] = found.get(name, (index, index))[0], index
    return found


def _name(line: Line, first: int, last: int, spans: Mapping[str, tuple[int, int]], taken: set[str]) -> str:
    """Name a layer after the innermost module around its matrix products.

    If that module also contains other layers, the layer gets the name of the module of its first product.
    """
    work = line.work[first:last]
    paths = [node.path for node in work if node.path and is_one_of(node.target, (*PRODUCTS, *LOOKUPS))]
    paths = paths or [node.path for node in work if node.path] or [work[0].name]
    name = paths[0]
    for path in paths[1:]:
        name = _common(name, path)
    begin, end = spans.get(name, (first, last - 1))
    if not name or begin < first or end >= last:
        name = paths[0]
    found = name if name not in taken else f"{name}#{first}"
    taken.add(found)
    return found


def _common(a: str, b: str) -> str:
    found = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        found.append(x)
    return ".".join(found)
