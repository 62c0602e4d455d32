"""A model's forward pass as flat data: one node per operation, in order, with the sizes of one example.

Nothing in it holds weights or objects of torch's tracer, so that it can be sent to workers, compared and hashed. A node that
reads a batch column, a parameter or a buffer names it; a region is a piece of graph that runs under a switch (no gradient,
no autocast), kept with the node that calls it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from meshwright.capture.trace.size_conditions import Condition, Shapes, broken


class NodeKind(enum.Enum):
    """What a node is."""

    COLUMN = "column"  # a column of the batch
    STATE = "state"  # a parameter or a buffer of the model, or a constant of its forward
    REGION = "region"  # a piece of graph for a node that calls it
    CALL = "call"  # an operation


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of another node, where it stands among arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A tensor of the example."""

    shape: tuple[int, ...]
    bytes: int
    dtype: str

    @property
    def learns(self) -> bool:
        """Can a gradient flow through it?"""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `size` is None for what is no tensor; `several` says that it is a tuple of them."""

    name: str
    kind: NodeKind
    target: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    size: Size | None = None
    several: bool = False
    random: bool = False
    path: str = ""
    body: Flat | None = None
    memory: tuple[int, ...] = ()
    """The numbers of the memory that its value may live in."""
    writes: tuple[int, ...] = ()
    """The memory that it may write into."""
    changes: tuple[str, ...] = ()
    """The parameters and buffers that it writes into."""
    constant: Any = None
    """The values of a tensor that forward itself has made from numbers, as nested lists."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The nodes that it takes values from."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))


@dataclass(frozen=True)
class Flat:
    """Nodes in order, and what the whole returns; `conditions` are what the trace took for granted about sizes."""

    nodes: tuple[Node, ...]
    result: Any
    outputs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    training: bool = True
    """Was the model in training mode? Its operations then switch to evaluation by themselves, where torch's can."""

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The dtype of every column."""
        return {node.target: node.size.dtype for node in self.nodes if node.kind is NodeKind.COLUMN and node.size is not None}

    @property
    def moved(self) -> tuple[str, ...]:
        """The buffers that it changes."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.changes))

    def refusal(self, shapes: Shapes) -> str | None:
        """Why a batch with these shapes of columns cannot run on this graph; None where it can."""
        condition = broken(self.conditions, shapes)
        return None if condition is None else str(condition)

    @property
    def random(self) -> bool:
        """Does a forward draw numbers?"""
        return any(node.random or (node.body is not None and node.body.random) for node in self.nodes)

    @cached_property
    def digest(self) -> str:
        """Equal where the graphs are equal."""
        return sha256(repr((self.nodes, self.result, self.conditions, self.training)).encode()).hexdigest()[:16]


def refs(tree: Any) -> Iterator[Ref]:
    """The references among arguments."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from refs(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from refs(part)
    elif isinstance(tree, slice):
        yield from refs((tree.start, tree.stop, tree.step))


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments with every leaf changed; references are leaves."""
    if isinstance(tree, tuple | list):
        parts = [mapped(part, change) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    if isinstance(tree, dict):
        return {key: mapped(part, change) for key, part in tree.items()}
    if isinstance(tree, slice):
        return slice(mapped(tree.start, change), mapped(tree.stop, change), mapped(tree.step, change))
    return change(tree)
