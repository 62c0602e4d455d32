"""Modules from pieces of a flat graph: one per layer, with the model's own parameters and buffers inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshwright.capture.crossing import Line
from meshwright.capture.flat import Flat, Kind, Node, Ref, mapped
from meshwright.capture.operations import CHECKS, function_of, is_one_of
from meshwright.capture.pieces import piece
from meshwright.errors import MeshwrightError


class Captured(nn.Module):
    """One layer of a captured model: takes what crosses from the layer before, and the batch columns it names."""

    def __init__(self, body: fx.GraphModule, columns: tuple[str, ...], names: Mapping[str, str], *, inplace: bool) -> None:
        super().__init__()
        self.body, self.columns, self.inplace = body, columns, inplace
        self.original = dict(names)
        """The model's own name of each parameter in here, and of each buffer that its state_dict holds."""

    def forward(self, *values: Tensor, **columns: Tensor) -> tuple[Tensor, ...]:
        """Run the piece."""
        result: tuple[Tensor, ...] = self.body(*values, *(columns[name] for name in self.columns))
        return result


class States:
    """Parameters, buffers and constants of a model by name; one that is tied has several names and is one object."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.first: dict[nn.Parameter, str] = {}
        for name, parameter in self.parameters.items():
            self.first.setdefault(parameter, name)
        self.kept = frozenset(model.state_dict(keep_vars=True))

    def of(self, node: Node, device: torch.device | None) -> Tensor:
        """The tensor behind a node: a parameter, a buffer, a constant, or a tensor that a module merely has."""
        name = node.target
        if node.constant is not None and node.size is not None:
            dtype = getattr(torch, node.size.dtype)
            return torch.tensor(node.constant, dtype=dtype, device=device).reshape(node.size.shape)
        found: Any = self.parameters.get(name, self.buffers.get(name))
        if found is None:
            found = self.model
            for part in name.split("."):
                found = getattr(found, part, None)
        if not isinstance(found, Tensor):
            raise MeshwrightError(f"the captured graph reads {name!r}, which the model does not have")
        return found


class _Builder:
    """A graph that grows node by node."""

    def __init__(self, line: Line, states: States, device: torch.device | None) -> None:
        self.line, self.states, self.device = line, states, device
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.made: dict[str, fx.Node] = {}
        self.names: dict[str, str] = {}
        self.inplace = False

    def value(self, tree: Any) -> Any:
        """Arguments with nodes of the new graph, and devices where it is to run."""
        return mapped(tree, self._leaf)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self.made[leaf.name]
        if isinstance(leaf, torch.device):
            return self.device or leaf
        return leaf

    def state(self, argument: Any) -> nn.Parameter | None:
        """The parameter behind a reference."""
        if not isinstance(argument, Ref):
            return None
        node = self.line.flat.by_name[argument.name]
        return self.states.parameters.get(node.target) if node.kind is Kind.STATE else None

    def add(self, node: Node) -> None:
        """One more node; parameters and buffers are added where they are first read."""
        self.inplace |= node.inplace
        kwargs = dict(node.kwargs)
        found = piece(node.target, node.args, kwargs, self.state)
        if found is not None:
            module, args = found
            name = f"at_{len(self.root)}_{node.name}"
            self.root[name] = module
            self._note(name, module)
            more = kwargs if len(args) == len(node.args) else {}
            self.made[node.name] = self.graph.call_module(name, tuple(self._read(args)), self._read(more))
            return
        args, kwargs = self._read(node.args), self._read(kwargs)
        self.made[node.name] = self.graph.call_function(function_of(node.target), tuple(args), kwargs)

    def _read(self, tree: Any) -> Any:
        for name in _names(tree):
            if name not in self.made:
                self._attribute(self.line.flat.by_name[name])
        return self.value(tree)

    def _attribute(self, node: Node) -> None:
        name = node.target.replace(".", "_")
        if node.kind is Kind.REGION:
            assert node.body is not None
            self.root[name] = _region(node.body, self.states, self.device)
        else:
            assert node.kind is Kind.STATE, f"{node.name} is read before it is made"
            self.root[name] = self.states.of(node, self.device)
            if node.target in self.states.parameters:
                self.names[f"body.{name}"] = self.states.first[self.states.parameters[node.target]]
            elif node.target in self.states.kept:
                self.names[f"body.{name}"] = node.target
        self.made[node.name] = self.graph.get_attr(name)

    def _note(self, name: str, module: nn.Module) -> None:
        for own, parameter in module.named_parameters(remove_duplicate=False):
            self.names[f"body.{name}.{own}"] = self.states.first[parameter]

    def module(self) -> fx.GraphModule:
        """The graph as a module."""
        root = nn.Module()
        for name, found in self.root.items():
            if isinstance(found, nn.Parameter):
                root.register_parameter(name, found)
            elif isinstance(found, nn.Module):
                root.add_module(name, found)
            else:
                root.register_buffer(name, found, persistent=False)
        return fx.GraphModule(root, self.graph, "Captured")


def _names(tree: Any) -> Iterable[str]:
    found: list[str] = []
    mapped(tree, lambda leaf: found.append(leaf.name) if isinstance(leaf, Ref) else None)
    return found


def layer(line: Line, first: int, last: int, states: States, device: torch.device | None = None) -> Captured:
    """The operations first..last-1 of a line as a module; the last layer returns what the model returns."""
    ends = last == len(line.work)
    own = [node.name for node in line.work[first:last]]
    results = line.flat.result if ends else [Ref(name) for name in line.crossings[last]]
    taken = line.crossings[first]
    wanted = needed(line, [*own, *(_names(results) if ends else ())])
    columns = tuple(line.flat.by_name[name].target for name in wanted if line.flat.by_name[name].kind is Kind.COLUMN)
    builder = _Builder(line, states, device)
    for name in taken:
        builder.made[name] = builder.graph.placeholder(name)
    for name in wanted:
        if line.flat.by_name[name].kind is Kind.COLUMN:
            builder.made[name] = builder.graph.placeholder(name)
    inside = {*own, *wanted}
    for node in line.flat.nodes:
        if node.name in inside and node.kind is Kind.CALL and node.name not in builder.made:
            builder.add(node)
    builder.graph.output(tuple(builder.made[name] for name in _names(results)))
    return Captured(builder.module(), columns, builder.names, inplace=builder.inplace)


def needed(line: Line, names: Iterable[str]) -> dict[str, None]:
    """What is made again for these nodes, columns included."""
    names = list(names)
    found = {n: None for n in (*line.closure(names), *names) if n in line.free}
    order = {node.name: i for i, node in enumerate(line.flat.nodes)}
    return dict.fromkeys(sorted(found, key=order.__getitem__))


def free_graph(
    line: Line, name: str, states: States, device: torch.device | None = None
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """A value that depends on no parameter, from columns alone."""
    wanted = needed(line, [name])
    builder = _Builder(line, states, device)
    columns = [n for n in wanted if line.flat.by_name[n].kind is Kind.COLUMN]
    for column in columns:
        builder.made[column] = builder.graph.placeholder(column)
    for node in line.flat.nodes:
        if node.name in wanted and node.kind is Kind.CALL:
            builder.add(node)
    builder.graph.output(builder.made[name])
    return builder.module(), tuple(line.flat.by_name[c].target for c in columns)


def _region(flat: Flat, states: States, device: torch.device | None) -> fx.GraphModule:
    """A piece of graph that runs under a switch."""
    builder = _Builder(Line(flat, frozenset()), states, device)
    for node in flat.nodes:
        if node.kind is Kind.COLUMN:
            builder.made[node.name] = builder.graph.placeholder(node.name)
        elif node.kind is Kind.CALL and not is_one_of(node.target, CHECKS):
            builder.add(node)
    builder.graph.output(builder.value(flat.result))
    return builder.module()
