"""A model's forward pass as flat data: one node per operation, in order, with the sizes of one example.

It holds no weights and no objects of torch's tracer, so it can be sent to workers, compared and hashed. A node that reads a batch
column, a parameter or a buffer refers to it by name. A region is a subgraph that runs under a switch such as `no_grad` or
disabled autocast; it is stored with the node that calls it.
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
    """The kind of a node."""

    COLUMN = "column"  # a column of the batch
    STATE = "state"  # a parameter or a buffer of the model, or a constant of its forward
    REGION = "region"  # a subgraph for the node that calls it
    CALL = "call"  # an operation


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value of another node, used among arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """Shape, bytes and dtype of a tensor in the example."""

    shape: tuple[int, ...]
    bytes: int
    dtype: str

    @property
    def learns(self) -> bool:
        """True if a gradient can flow through it."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `size` is None if its value is not a tensor; `several` is true if its value is a tuple of tensors."""

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
    """The numbers of the storages that its value may use."""
    writes: tuple[int, ...] = ()
    """The storages that it may write into."""
    changes: tuple[str, ...] = ()
    """The parameters and buffers that it writes into."""
    constant: Any = None
    """The values of a tensor that the forward made from plain numbers, as nested lists."""

    def argument(self, place: int, name: str, default: Any) -> Any:
        """Returns an argument, given by place or by name."""
        return self.args[place] if len(self.args) > place else dict(self.kwargs).get(name, default)

    @property
    def reads(self) -> tuple[str, ...]:
        """The nodes whose values it takes."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))


@dataclass(frozen=True)
class Flat:
    """The nodes in order, and what the whole graph returns. `conditions` are what the trace assumed about sizes."""

    nodes: tuple[Node, ...]
    result: Any
    outputs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    training: bool = True
    """True if the model was traced in training mode. Torch's own operations then switch to evaluation themselves, if they can."""

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
        """The buffers that the forward changes."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.changes))

    def refusal(self, shapes: Shapes) -> str | None:
        """Return the condition that a batch with these column shapes breaks, or None if the graph can run it."""
        condition = broken(self.conditions, shapes)
        return None if condition is None else str(condition)

    @property
    def random(self) -> bool:
        """True if the forward draws random numbers."""
        return any(node.random or (node.body is not None and node.body.random) for node in self.nodes)

    @cached_property
    def digest(self) -> str:
        """A hash that is equal for equal graphs."""
        return sha256(repr((self.nodes, self.result, self.conditions, self.training)).encode()).hexdigest()[:16]


def refs(tree: Any) -> Iterator[Ref]:
    """Yield the references among arguments."""
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
    """Apply a function to every leaf of the arguments; references are leaves."""
    if isinstance(tree, tuple | list):
        parts = [mapped(part, change) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    if isinstance(tree, dict):
        return {key: mapped(part, change) for key, part in tree.items()}
    if isinstance(tree, slice):
        return slice(mapped(tree.start, change), mapped(tree.stop, change), mapped(tree.step, change))
    return change(tree)
