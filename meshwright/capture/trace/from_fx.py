"""Converts an exported graph into plain data: nodes by name, sizes of the example, and the module of each operation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.trace.autograd_functions import FUNCTION, ArgumentSlot, Call
from meshwright.capture.trace.graph import Flat, Node, NodeKind, Ref, Size
from meshwright.capture.trace.operations import is_one_of, is_random, name_of
from meshwright.capture.trace.storages import Memory
from meshwright.errors import MeshwrightError
from meshwright.torch_internals import size_in_example

INNER = "model"
"""The attribute name of the model inside the module that is traced."""


@dataclass(frozen=True)
class _Trace:
    """Facts about the whole trace."""

    known: Collection[str]
    calls: Mapping[str, Call]
    memory: Memory = field(default_factory=Memory)


def transcribe(
    graph: torch.fx.Graph, outputs: tuple[str, ...], columns: tuple[str, ...], known: Collection[str], calls: Mapping[str, Call]
) -> Flat:
    """Convert a whole graph.

    `known` are the names of the model's parameters and buffers; other tensors are kept as constants. `calls` is the table of the
    calls of users' functions.
    """
    nodes: list[Node] = []
    result: Any = None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip((node.name for node in inputs), columns, strict=True))
    trace = _Trace(known, calls)
    for node in graph.nodes:
        if node.op == "output":
            result = _tree(node.args[0])
        else:
            nodes.append(_node(node, names, trace))
    return Flat(tuple(nodes), tuple(_flattened(result)), outputs, columns)


def _flattened(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        for part in tree:
            yield from _flattened(part)
    else:
        yield tree


def _node(node: torch.fx.Node, columns: Mapping[str, str], trace: _Trace) -> Node:
    value = node.meta.get("val")
    size, several = _size(value), isinstance(value, tuple | list)
    if node.op == "placeholder":
        return Node(node.name, NodeKind.COLUMN, columns.get(node.name, node.name), size=size, memory=trace.memory.of(value))
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.fx.GraphModule):
            return Node(node.name, NodeKind.REGION, str(node.target), body=_region(owner.graph, trace))
        name = str(node.target).removeprefix(f"{INNER}.")
        if not isinstance(owner, Tensor):
            raise MeshwrightError(
                f"the forward uses {name!r}, a {type(owner).__name__}, which a captured graph cannot hold",
                fix="draw from torch's default generator" if isinstance(owner, torch.Generator) else "use tensors only",
            )
        constant = None if name in trace.known or owner.is_meta else owner.detach().tolist()
        mine = trace.memory.of_state(name, value)
        return Node(node.name, NodeKind.STATE, name, size=_size(owner), constant=constant, memory=mine)
    assert node.op == "call_function", f"{node.op} in an exported graph"
    target, args = name_of(node.target), tuple(node.args)
    random = is_random(node.target, node.args, dict(node.kwargs))
    if is_one_of(target, (FUNCTION,)):
        call = trace.calls[str(args[1])]
        target, random = f"{FUNCTION}.{call.name}", call.random
        tensors: Any = args[0]
        args = tuple(tensors[a.index] if isinstance(a, ArgumentSlot) else a for a in call.arguments)
    return Node(
        node.name,
        NodeKind.CALL,
        target,
        _tree(args),
        tuple((key, _tree(part)) for key, part in node.kwargs.items()),
        size,
        several,
        random,
        _path(node),
        memory=trace.memory.made_by(node),
        writes=trace.memory.written_by(node),
        changes=trace.memory.changed_by(node),
    )


def _region(graph: torch.fx.Graph, trace: _Trace) -> Flat:
    nodes, result = [], None
    for node in graph.nodes:
        if node.op == "output":
            result = _tree(node.args[0])
        else:
            nodes.append(_node(node, {}, trace))
    return Flat(tuple(nodes), result)


def _tree(tree: Any) -> Any:
    """Replace nodes among arguments by references."""
    if isinstance(tree, torch.fx.Node):
        return Ref(tree.name)
    if isinstance(tree, tuple | list):
        parts = [_tree(part) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    if isinstance(tree, dict):
        return {key: _tree(part) for key, part in tree.items()}
    if isinstance(tree, slice):
        return slice(_tree(tree.start), _tree(tree.stop), _tree(tree.step))
    return tree


def _size(value: Any) -> Size | None:
    if not isinstance(value, Tensor):
        return None
    shape = tuple(size_in_example(size) for size in value.shape)
    count = 1
    for size in shape:
        count *= size
    return Size(shape, count * value.element_size(), str(value.dtype).removeprefix("torch."))


def _path(node: torch.fx.Node) -> str:
    """Return the path of the module that an operation belongs to, as the model names it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix(INNER).removeprefix(".") if path.startswith(INNER) else ""
