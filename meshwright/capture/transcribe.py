"""A traced graph written down as data: nodes by name, sizes as in the example, the module that each operation stands in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.flat import Flat, Kind, Node, Ref, Size
from meshwright.capture.memory import Memory
from meshwright.capture.operations import is_random, name_of

INNER = "model"
"""What the model is called inside the module that is traced."""


def transcribe(graph: torch.fx.Graph, outputs: tuple[str, ...], columns: tuple[str, ...], known: Collection[str]) -> Flat:
    """A whole graph; `known` are the names of the model's parameters and buffers, other tensors are kept as constants."""
    nodes: list[Node] = []
    result: Any = None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip((node.name for node in inputs), columns, strict=True))
    memory = Memory()
    for node in graph.nodes:
        if node.op == "output":
            result = _tree(node.args[0])
        else:
            nodes.append(_node(node, names, known, memory))
    return Flat(tuple(nodes), tuple(_flattened(result)), outputs, columns)


def _flattened(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        for part in tree:
            yield from _flattened(part)
    else:
        yield tree


def _node(node: torch.fx.Node, columns: Mapping[str, str], known: Collection[str], memory: Memory) -> Node:
    value = node.meta.get("val")
    size, several = _size(value), isinstance(value, tuple | list)
    if node.op == "placeholder":
        return Node(node.name, Kind.COLUMN, columns.get(node.name, node.name), size=size, memory=memory.of(value))
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.fx.GraphModule):
            return Node(node.name, Kind.REGION, str(node.target), body=_region(owner.graph, known, memory))
        name = str(node.target).removeprefix(f"{INNER}.")
        constant = None if name in known or owner.is_meta else owner.detach().tolist()
        mine = memory.of_state(name, value)
        return Node(node.name, Kind.STATE, name, size=_size(owner), constant=constant, memory=mine)
    assert node.op == "call_function", f"{node.op} in an exported graph"
    return Node(
        node.name,
        Kind.CALL,
        name_of(node.target),
        _tree(tuple(node.args)),
        tuple((key, _tree(part)) for key, part in node.kwargs.items()),
        size,
        several,
        is_random(node.target, node.args, dict(node.kwargs)),
        _path(node),
        memory=memory.made_by(node),
        writes=memory.written_by(node),
        changes=memory.changed_by(node),
    )


def _region(graph: torch.fx.Graph, known: Collection[str], memory: Memory) -> Flat:
    nodes, result = [], None
    for node in graph.nodes:
        if node.op == "output":
            result = _tree(node.args[0])
        else:
            nodes.append(_node(node, {}, known, memory))
    return Flat(tuple(nodes), result)


def _tree(tree: Any) -> Any:
    """Arguments with references in place of nodes."""
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
    shape = tuple(hint(size) for size in value.shape)
    count = 1
    for size in shape:
        count *= size
    return Size(shape, count * value.element_size(), str(value.dtype).removeprefix("torch."))


def hint(size: Any) -> int:
    """An open size as it is in the example; one that depends on the data counts as 1."""
    if isinstance(size, int):
        return size
    known = getattr(size.node, "hint", None)
    return 1 if known is None else int(known)


def _path(node: torch.fx.Node) -> str:
    """The module that an operation stands in, as the model names it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix(INNER).removeprefix(".") if path.startswith(INNER) else ""
