"""Captures a model that is given by name: it is built and captured on the meta device, so weights use no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.check.check_result import Verdict
from meshwright.capture.model_graph import capture
from meshwright.capture.repeat.capture_for_costs import flatten_for_costs
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat, NodeKind
from meshwright.capture.weights.sketch import sketch
from meshwright.errors import MeshwrightError
from meshwright.ir.imported_function import function
from meshwright.ir.model import Layer, ModelGraph
from meshwright.train.models.example_batches import example_for
from meshwright.train.models.model_names import resolve_model
from meshwright.train.setup.check_capture import Start, verdict_of


def checked(
    name: str, stages: int, *, rows: int = 2, length: int | None = None, batch: str | None = None, cuts: Sequence[str] = ()
) -> Verdict | None:
    """Fill a named model, and compare its captured layers with it; None if it is too large."""
    sketched = sketch(resolve_model(name).build)
    model = sketched.model
    example = function(batch)(0) if batch is not None else example_for(name, model, rows=max(rows, 2), length=length)(0)
    flat = flatten(model, example)
    verdict = verdict_of(Start(sketched, flat, example, stages, list(cuts) or None))
    return None if verdict is None else verdict[0]


@dataclass(frozen=True)
class NamedGraph:
    """A named model on the meta device, its graph for two or more rows as `trace` captured it, and the rows asked for."""

    model: nn.Module
    flat: Flat
    example: Any
    rows: int
    trace: Callable[[nn.Module, Any], Flat]

    def layers(self) -> ModelGraph:
        """Returns the layers of the model."""
        two = capture(self.model, self.example, flat=self.flat)
        if self.rows != 1:
            return two
        three = _repeated(_first(self.example), 3)
        return one_row(two, capture(self.model, three, flat=self.trace(self.model, three)))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every column of the batch."""
        columns = [node for node in self.flat.nodes if node.kind is NodeKind.COLUMN]
        return {n.target: (self.rows, *n.size.shape[1:]) for n in columns if n.size is not None}


def named_graph(
    name: str, *, rows: int | None = None, length: int | None = None, batch: str | None = None, whole: bool = True
) -> NamedGraph:
    """Build a named model on the meta device and capture it.

    Without `whole`, equal blocks are captured once: layers, costs and cuts are the same, but not all names of values.
    """
    model, example = named_model(name, rows=rows, length=length, batch=batch)
    count = _rows(example)
    example = _repeated(example, 2) if count == 1 else example
    trace = flatten if whole else flatten_for_costs
    return NamedGraph(model, trace(model, example), example, count, trace)


def named_model(
    name: str, *, rows: int | None = None, length: int | None = None, batch: str | None = None
) -> tuple[nn.Module, Any]:
    """Build a named model on the meta device, and an example of its data."""
    if batch is not None and (rows is not None or length is not None):
        raise MeshwrightError(f"{batch} decides the number of rows and tokens; --rows and --length are for models by name")
    rows = 2 if rows is None else rows
    if rows < 1 or (length is not None and length < 1):
        raise MeshwrightError(
            f"an example needs at least one row and one token, got {rows} and {length}", fix="--rows 2 --length 64"
        )
    named = resolve_model(name)
    if named.is_own and batch is None:
        raise MeshwrightError(f"{name} needs an example of its data", fix="--batch-function package.module:function")
    given = None if batch is None else function(batch)(0)
    with torch.device("meta"):
        model = named.build()
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList):
        raise MeshwrightError(
            f"{name} returns {type(model).__name__}: a list of layers is cut as it is, there is nothing to capture",
            fix="use gpt-tiny, or a function that returns one module",
        )
    example = example_for(name, model, rows=rows, length=length)(0) if given is None else given
    return model, example


def _rows(example: Any) -> int:
    columns = list(example.values() if isinstance(example, Mapping) else example)
    return len(columns[0]) if columns and isinstance(columns[0], Tensor) and columns[0].dim() else 0


def _repeated(example: Any, times: int) -> Any:
    """Repeat the row of a one-row example."""
    if isinstance(example, Mapping):
        return {name: torch.cat([t] * times) for name, t in example.items()}
    return type(example)(torch.cat([t] * times) for t in example)


def _first(example: Any) -> Any:
    """Return the first row of an example."""
    if isinstance(example, Mapping):
        return {name: t[:1] for name, t in example.items()}
    return type(example)(t[:1] for t in example)


def one_row(two: ModelGraph, three: ModelGraph) -> ModelGraph:
    """Compute the layers for one row from those for two and three rows, because a trace would treat a single row as static.

    FLOPs and sizes grow linearly with rows, so the difference between three and two rows is subtracted from two.
    """
    if [layer.name for layer in two.layers] != [layer.name for layer in three.layers]:
        raise MeshwrightError("the layers of this model change with the number of rows", fix="--rows 2")
    return replace(two, layers=tuple(map(_less, two.layers, three.layers)))


def _less(two: Layer, three: Layer) -> Layer:
    output = tuple(
        replace(a, shape=tuple(2 * m - n for m, n in zip(a.shape, b.shape, strict=True)), bytes=2 * a.bytes - b.bytes)
        for a, b in zip(two.output, three.output, strict=True)
    )
    saved = max(0, 2 * two.saved_bytes - three.saved_bytes)
    return replace(two, flops=max(0.0, 2 * two.flops - three.flops), saved_bytes=saved, output=output)
