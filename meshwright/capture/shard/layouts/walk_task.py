"""What a walk over a flat graph works on and finds: the task that all walks over a model share, and lines of the report."""

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
    """What a rule has made of a node: the step with its value, and its layout."""

    step: str
    layout: Layout


@dataclass
class Findings:
    """What is found out about a model on the way."""

    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    extra: list[ExtraMove] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What all walks over a model share."""

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
    """Values that a gradient comes back to."""
    values: frozenset[str]
    """Values that depend on what is in a batch, not only on its shape."""
    whole: frozenset[str] = frozenset()
    """Operations that may read whole parameters on every rank though what else they read is cut."""
    misfits: Mapping[str, str] = field(default_factory=dict)
    """Operations that their rule does not fit, and why: they run on whole values."""
    shared: frozenset[str] = frozenset()
    """Parameters with readers that cut their work differently, by their first names."""


def operation(node: Node) -> str:
    """The name of an operation without its overload, and without the underscore of one that works in place."""
    parts = node.target.split(".")
    return ".".join(parts[:2]).rstrip("_") if not parts[1].startswith("__") else ".".join(parts[:2])


def locals_in(tree: Any) -> list[Local]:
    """The values of steps among arguments."""
    found: list[Local] = []
    mapped(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Local) else None)
    return found
