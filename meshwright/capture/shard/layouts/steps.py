"""A local program as data: the steps that a rank runs instead of the operations of a flat graph. It is equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from meshwright.capture.shard.layouts.layout import Layout
from meshwright.capture.trace.graph import Node
from meshwright.costs.scheme import Axes
from meshwright.tensor.moves import Move


class StepKind(Enum):
    """The kinds of steps."""

    OPERATION = "operation"  # an operation of torch, by the name that the flat graph has for it
    LOCAL = "local"  # a function of `tensor/local_ops.py`
    MOVE = "move"  # a change of layout, most with a collective
    PARAMETER = "parameter"  # this rank's part of a parameter
    DROPOUT = "dropout"  # drawn for the whole tensor, of which this rank takes its part
    NATIVE = "native"  # a node of the flat graph as it is


@dataclass(frozen=True, slots=True)
class Local:
    """A reference to the value of another step, among the arguments of a step."""

    name: str


@dataclass(frozen=True, slots=True)
class Offset:
    """The offset of a rank's block: its position along some axes times the size of a block."""

    axes: Axes
    block: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `shape` is that of a rank's part, None if it is not a tensor. `learns`: it needs a gradient."""

    name: str
    kind: StepKind
    target: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    shape: tuple[int, ...] | None = None
    learns: bool = False
    path: str = ""
    move: Move | None = None
    node: Node | None = None
    layout: Layout | None = None
    weight: bool = False
    """Whether it moves a weight. Then it depends on no activation and can start early."""


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """How a parameter is stored, and the axes over which its gradient is a partial sum until gradients are reduced."""

    layout: Layout
    unsummed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Product:
    """A line of the report: a product, its role and how its weight is cut."""

    path: str
    role: str
    weight: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class ExtraMove:
    """A line of the report: a change of layout that the scheme does not ask for."""

    path: str
    operation: str
    reason: str
