"""Captures a model that is given by name: it is built and captured on the meta device, so weights use no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.check.check_result import Verdict
from meshwright.capture.model_graph import capture
from meshwright.capture.trace.export import flatten
from meshwright.capture.weights.sketch import sketch
from meshwright.errors import MeshwrightError
from meshwright.ir.imported_function import function
from meshwright.ir.model import Layer, ModelGraph
from meshwright.train.models.model_names import model_file
from meshwright.train.setup.check_capture import Start, verdict_of

TOKENS = 64
"""The default number of tokens per row of an example; fewer if the model has fewer positions."""
LARGEST_EXAMPLE = 1 << 27
"""The largest number of elements in a column of an example: one gigabyte of tokens."""


def checked(
    name: str, stages: int, *, rows: int = 2, length: int | None = None, batch: str | None = None, cuts: Sequence[str] = ()
) -> Verdict | None:
    """Fill a named model, and compare its captured layers with it; None if it is too large."""
    example: Any = None
    if ":" in name:
        build, example = function(name), None if batch is None else function(batch)(0)
    else:
        build = model_file(name).build
    sketched = sketch(build)
    model = sketched.model
    if example is None:
        example = _drawn(model, _example(name, model, max(rows, 2), length))
    flat = flatten(model, example)
    verdict = verdict_of(Start(sketched, flat, example, stages, list(cuts) or None))
    return None if verdict is None else verdict[0]


def _drawn(model: Any, example: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill an example with random tokens, pictures and classes."""
    drawn, config = torch.Generator().manual_seed(0), model.config
    for name, t in example.items():
        if t.is_floating_point():
            example[name] = torch.randn(t.shape, generator=drawn)
        elif name != "attention_mask":
            most = config.num_labels if name == "labels" and "Classification" in type(model).__name__ else config.vocab_size
            example[name] = torch.randint(0, most, t.shape, generator=drawn)
    return example


def weightless(name: str, *, rows: int | None = None, length: int | None = None, batch: str | None = None) -> ModelGraph:
    """Capture a preset, a file or the result of a function on the meta device. The default number of rows is two."""
    if batch is not None and (rows is not None or length is not None):
        raise MeshwrightError(f"{batch} decides the number of rows and tokens; --rows and --length are for models by name")
    rows = 2 if rows is None else rows
    if rows < 1 or (length is not None and length < 1):
        raise MeshwrightError(
            f"an example needs at least one row and one token, got {rows} and {length}", fix="--rows 2 --length 64"
        )
    if ":" in name:
        if batch is None:
            raise MeshwrightError(f"{name} needs an example of its data", fix="--batch-function package.module:function")
        example: Any = function(batch)(0)
        with torch.device("meta"):
            model = function(name)()
    else:
        with torch.device("meta"):
            model = model_file(name).build()
        example = _example(name, model, rows, length)
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList):
        raise MeshwrightError(
            f"{name} returns {type(model).__name__}: a list of layers is cut as it is, there is nothing to capture",
            fix="use a function that returns one module",
        )
    if _rows(example) != 1:
        return capture(model, example)
    return one_row(capture(model, _repeated(example, 2)), capture(model, _repeated(example, 3)))


def _rows(example: Any) -> int:
    columns = list(example.values() if isinstance(example, Mapping) else example)
    return len(columns[0]) if columns and isinstance(columns[0], Tensor) and columns[0].dim() else 0


def _repeated(example: Any, times: int) -> Any:
    """Repeat the row of a one-row example."""
    if isinstance(example, Mapping):
        return {name: torch.cat([t] * times) for name, t in example.items()}
    return type(example)(torch.cat([t] * times) for t in example)


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


def _example(name: str, model: Any, rows: int, length: int | None) -> dict[str, Tensor]:
    """Make a batch for a model of transformers from its main input and its task."""
    length = _length(name, model, length)
    config, one_label = model.config, "Classification" in type(model).__name__ and "Token" not in type(model).__name__
    _refuse_size(rows, 1 if one_label else length)
    labels = torch.zeros((rows,) if one_label else (rows, length), dtype=torch.int64)
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        _refuse_size(rows, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.zeros(rows, getattr(config, "num_channels", 3), height, width), "labels": labels}
    if model.main_input_name != "input_ids":
        raise MeshwrightError(
            f"{type(model).__name__} takes {model.main_input_name!r}, for which no example can be made",
            fix="use package.module:function with --batch-function",
        )
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _length(name: str, model: Any, asked: int | None) -> int:
    """Return the tokens per row: the requested number, if the model has that many positions."""
    if asked is not None and model.main_input_name == "pixel_values":
        raise MeshwrightError(f"{name} takes pictures, which have no --length {asked}")
    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return asked or TOKENS
    if asked is not None and asked > most:
        raise MeshwrightError(f"{name} takes {most} tokens per row, not {asked}", fix=f"--length {most}")
    return asked or min(TOKENS, most)


def _refuse_size(*sizes: int) -> None:
    """Raise if an example is too large. It only has to show what the layers look like."""
    if (elements := prod(sizes)) > LARGEST_EXAMPLE:
        shape = " x ".join(map(str, sizes))
        raise MeshwrightError(
            f"an example of {shape} has {elements} elements, the limit is {LARGEST_EXAMPLE}",
            fix="--rows 2 --length 64",
        )
