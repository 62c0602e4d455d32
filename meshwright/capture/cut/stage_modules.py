"""Builds modules from parts of a flat graph: one per layer, with the model's own parameters and buffers inside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.op_modules import Counts, piece
from meshwright.capture.trace.graph import Flat, Node, NodeKind, Ref, mapped
from meshwright.capture.trace.operations import CHECKS, function_of, is_one_of
from meshwright.errors import MeshwrightError


class Prelude(nn.Module):
    """Computes the parameter-free values of all layers of a stage from the batch columns, once for all of them."""

    def __init__(self, body: fx.GraphModule, columns: tuple[str, ...], names: tuple[str, ...]) -> None:
        super().__init__()
        self.body, self.columns, self.names = body, columns, names

    def forward(self, columns: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the values by name."""
        return dict(zip(self.names, self.body(*(columns[name] for name in self.columns)), strict=True))


class Captured(nn.Module):
    """One layer of a captured model: takes the values that cross from the layer before, and the batch columns that it names.

    `made_again` is a table in which layers that run one after another on the same columns share the result of their prelude.
    """

    takes_made_again = True

    def __init__(self, body: fx.GraphModule, columns: tuple[str, ...], names: Mapping[str, str], *, inplace: bool) -> None:
        super().__init__()
        self.body, self.batch_columns, self.direct, self.inplace = body, columns, columns, inplace
        self.prelude: Prelude | None = None
        self.free: tuple[str, ...] = ()
        self.original = dict(names)
        """The model's own name of each parameter in this layer, and of each buffer that is in the state_dict."""

    def after(self, prelude: Prelude, free: tuple[str, ...], names: Mapping[str, str]) -> Captured:
        """Take these values from a prelude. Returns the layer itself."""
        self.prelude, self.free = prelude, free
        self.batch_columns = tuple(dict.fromkeys((*prelude.columns, *self.direct)))
        self.original |= {f"prelude.{name}": own for name, own in names.items()}
        return self

    def forward(self, *values: Tensor, made_again: dict[int, Any] | None = None, **columns: Tensor) -> tuple[Tensor, ...]:
        """Run the layer."""
        direct = [columns[name] for name in self.direct]
        free: list[Any] = []
        if self.prelude is not None:
            table = {} if made_again is None else made_again
            if (key := id(self.prelude)) not in table:
                table[key] = self.prelude(columns)
            free = [table[key][name] for name in self.free]
        result: tuple[Tensor, ...] = self.body(*values, *direct, *free)
        return result


class States:
    """Parameters, buffers and constants of a model by name. A tied parameter has several names but is one object."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.first: dict[nn.Parameter, str] = {}
        for name, parameter in self.parameters.items():
            self.first.setdefault(parameter, name)
        self.kept = frozenset(model.state_dict(keep_vars=True))

    def of(self, node: Node, device: torch.device | None) -> Tensor:
        """Return the tensor of a node: a parameter, a buffer, a constant, or a plain tensor attribute of a module."""
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


class GraphBuilder:
    """Builds a graph node by node."""

    def __init__(self, line: Line, states: States, device: torch.device | None) -> None:
        self.line, self.states, self.device = line, states, device
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.made: dict[str, fx.Node] = {}
        self.names: dict[str, str] = {}
        self.inplace = False

    def value(self, tree: Any) -> Any:
        """Replace references by nodes of the new graph, and devices by the device that it will run on."""
        return mapped(tree, self._leaf)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self.made[leaf.name]
        if isinstance(leaf, torch.device):
            return self.device or leaf
        return leaf

    def state(self, argument: Any) -> nn.Parameter | None:
        """Return the parameter that a reference points to, or None."""
        if not isinstance(argument, Ref):
            return None
        node = self.line.flat.by_name[argument.name]
        return self.states.parameters.get(node.target) if node.kind is NodeKind.STATE else None

    def add(self, node: Node) -> None:
        """Add one node. Parameters and buffers are added at their first use."""
        self.inplace |= bool(node.writes) and not node.changes
        kwargs = dict(node.kwargs)
        found = piece(node.target, node.args, kwargs, self.state)
        if node.changes and self.line.flat.training and not node.target.startswith("higher_order."):
            found = Counts(node.target), node.args
        if found is not None:
            module, args = found
            name = f"at_{len(self.root)}_{node.name}"
            self.root[name] = module
            self._note(name, module)
            more = kwargs if len(args) == len(node.args) else {}
            self.made[node.name] = self.graph.call_module(name, tuple(self.read(args)), self.read(more))
            return
        args, kwargs = self.read(node.args), self.read(kwargs)
        self.made[node.name] = self.graph.call_function(function_of(node.target), tuple(args), kwargs)

    def read(self, tree: Any) -> Any:
        for name in _names(tree):
            if name not in self.made:
                self.attribute(self.line.flat.by_name[name])
        return self.value(tree)

    def attribute(self, node: Node) -> None:
        name = node.target.replace(".", "_")
        if node.kind is NodeKind.REGION:
            assert node.body is not None
            self.root[name] = _region(replace(node.body, training=self.line.flat.training), self.states, self.device)
        else:
            assert node.kind is NodeKind.STATE, f"{node.name} is read before it is made"
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
        """Return the graph as a module."""
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
    """Return the operations first..last-1 of a line as a module that needs no prelude."""
    own = {node.name for node in line.work[first:last]}
    wanted = needed(line, [*own, *_results(line, last)])
    builder = GraphBuilder(line, states, device)
    direct = _start(builder, line.crossings[first], wanted)
    return _finish(builder, {*own, *wanted}, last, direct)


def stage(line: Line, places: Sequence[int], states: States, device: torch.device | None = None) -> list[Captured]:
    """Return the layers between these places, with one prelude for all of them."""
    pieces = list(pairwise(places))
    free = {(a, b): free_reads(line, a, b) for a, b in pieces}
    every = tuple(dict.fromkeys(name for names in free.values() for name in names))
    if not every or changes_late(line):
        return [layer(line, a, b, states, device) for a, b in pieces]
    body, columns, names = free_graph(line, every, states, device)
    prelude, found = Prelude(body, columns, every), []
    for first, last in pieces:
        builder = GraphBuilder(line, states, device)
        own = {node.name for node in line.work[first:last]}
        reads = [name for node in line.work[first:last] for name in node.reads]
        own_columns = [n for n in (*reads, *_results(line, last)) if n not in free[first, last]]
        direct = _start(builder, line.crossings[first], own_columns)
        for name in free[first, last]:
            builder.made[name] = builder.graph.placeholder(name)
        found.append(_finish(builder, own, last, direct).after(prelude, free[first, last], names))
    return found


def _start(builder: GraphBuilder, taken: Iterable[str], reads: Iterable[str]) -> tuple[str, ...]:
    """Add the inputs of a layer: the crossing values, then the columns that it reads itself."""
    by_name = builder.line.flat.by_name
    columns = dict.fromkeys(name for name in reads if by_name[name].kind is NodeKind.COLUMN and name not in builder.made)
    for name in (*taken, *columns):
        builder.made[name] = builder.graph.placeholder(name)
    for name in columns:
        if builder.line.is_written(name):  # the batch itself must not change
            builder.made[name] = builder.graph.call_function(torch.clone, (builder.made[name],))
    return tuple(by_name[name].target for name in columns)


def _finish(builder: GraphBuilder, inside: Collection[str], last: int, direct: tuple[str, ...]) -> Captured:
    """Add the operations of a layer in order, and its results: the crossing values, or the model's results in the last layer."""
    for node in builder.line.in_order(inside):
        if node.kind is NodeKind.CALL and node.name not in builder.made:
            builder.add(node)
    results = _results(builder.line, last) or builder.line.crossings[last]
    builder.graph.output(tuple(builder.made[name] for name in results))
    return Captured(builder.module(), direct, builder.names, inplace=builder.inplace)


def _results(line: Line, last: int) -> tuple[str, ...]:
    """Return the names of the model's results if the layer is the last one."""
    return tuple(_names(line.flat.result)) if last == len(line.work) else ()


def free_reads(line: Line, first: int, last: int) -> tuple[str, ...]:
    """Return the parameter-free values that a layer reads."""
    reads = [name for node in line.work[first:last] for name in node.reads]
    names = dict.fromkeys([*reads, *_results(line, last)])
    kinds = {n: line.flat.by_name[n].kind for n in names}
    return tuple(
        n for n in names if n in line.free and (kinds[n] is NodeKind.CALL or (kinds[n] is NodeKind.COLUMN and line.is_written(n)))
    )


def changes_late(line: Line) -> bool:
    """True if the model changes a parameter-free value in place after a layer has read it."""
    read: set[int] = set()
    for node in line.flat.nodes:
        if node.name in line.free:
            if not read.isdisjoint(node.writes):
                return True
        else:
            read |= {memory for name in node.reads for memory in line.flat.by_name[name].memory}
    return False


def needed(line: Line, names: Iterable[str]) -> dict[str, None]:
    """Return what must be recomputed for these nodes, including columns and the in-place operations that change their values."""
    names = list(names)
    final = {memory for name in names if name in line.free for memory in line.flat.by_name[name].memory}
    names += [n.name for n in line.free_writers if not final.isdisjoint(n.writes)]
    found = {n for n in (*line.closure(names), *names) if n in line.free}
    return {node.name: None for node in line.in_order(found)}


def free_graph(
    line: Line, names: Sequence[str], states: States, device: torch.device | None = None
) -> tuple[fx.GraphModule, tuple[str, ...], dict[str, str]]:
    """Build a graph that computes parameter-free values from columns only.

    Returns the graph, its columns, and the names of the saved tensors in it.
    """
    wanted = needed(line, names)
    builder = GraphBuilder(line, states, device)
    columns = _start(builder, (), wanted)
    for node in line.in_order(wanted):
        if node.kind is NodeKind.CALL:
            builder.add(node)
    builder.graph.output(builder.read(tuple(Ref(name) for name in names)))
    return builder.module(), columns, builder.names


def _region(flat: Flat, states: States, device: torch.device | None) -> fx.GraphModule:
    """Build the module of a subgraph that runs under a switch such as `no_grad`."""
    builder = GraphBuilder(Line(flat, frozenset()), states, device)
    for node in flat.nodes:
        if node.kind is NodeKind.COLUMN:
            builder.made[node.name] = builder.graph.placeholder(node.name)
        elif node.kind is NodeKind.CALL and not is_one_of(node.target, CHECKS):
            builder.add(node)
    builder.graph.output(builder.value(flat.result))
    return builder.module()
