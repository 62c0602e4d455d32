"""The input and output of a walk over a flat graph: the task that all walks over a model share, and their findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.capture.cut.liveness import Line
from meshwright.capture.shard.layouts.layout import Layout
from meshwright.capture.shard.layouts.sizes import Sizes
from meshwright.capture.shard.layouts.steps import ExtraMove, Local, ParameterCut, Product
from meshwright.capture.trace.graph import Node, mapped
from meshwright.costs.scheme import Grid, Scheme

if TYPE_CHECKING:
    from meshwright.capture.shard.layouts.walk import ShardWalk

Rule = Callable[["ShardWalk", Node], "Made | None"]
Push = Callable[["ShardWalk", Node, Layout, frozenset[str]], str]


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a rule: the step that computes the value, and its layout."""

    step: str
    layout: Layout


@dataclass
class Findings:
    """The findings of the walks over a model."""

    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    extra: list[ExtraMove] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The input that all walks over a model share."""

    line: Line
    sizes: Sizes
    scheme: Scheme
    grid: Grid
    ties: Mapping[str, str]
    """The first name of every parameter."""
    replicate: tuple[str, ...]
    rules: Mapping[str, Rule]
    pushes: Mapping[str, Push]
    light: frozenset[str]
    users: Mapping[str, tuple[Node, ...]]
    learning: frozenset[str]
    """Values that need a gradient."""
    values: frozenset[str]
    """Values that depend on the data of a batch, not only on its shape."""
    whole: frozenset[str] = frozenset()
    """Operations that may read whole parameters on every rank although their other inputs are cut."""
    misfits: Mapping[str, str] = field(default_factory=dict)
    """Operations whose rule does not apply, and why. They run on whole values."""
    shared: frozenset[str] = frozenset()
    """Parameters whose readers are cut in different ways, by their first names."""


def operation(node: Node) -> str:
    """Returns the name of an operation without its overload, and without the underscore of an in-place operation.

    A view of the bits as another type has its own name, since it changes values.
    """
    if node.target == "aten.view.dtype":
        return node.target
    parts = node.target.split(".")
    return ".".join(parts[:2]).rstrip("_") if not parts[1].startswith("__") else ".".join(parts[:2])


def locals_in(tree: Any) -> list[Local]:
    """Returns the steps among arguments."""
    found: list[Local] = []
    mapped(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Local) else None)
    return found
