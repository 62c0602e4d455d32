"""The layers of a model that is only named: built on the meta device and captured there, so that no weight takes memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.check.verdict import Verdict
from meshwright.capture.export import flatten
from meshwright.capture.graph import capture
from meshwright.capture.materialise import sketch
from meshwright.errors import MeshwrightError
from meshwright.ir.model import ModelGraph
from meshwright.train.named import function, model_file
from meshwright.train.start import Start, verdict_of

TOKENS = 64
"""Tokens per row of an example where nobody says how many; fewer where the model has fewer positions."""
LARGEST_EXAMPLE = 1 << 27
"""Elements of the largest column of an example: one gigabyte of tokens."""


def checked(
    name: str, stages: int, *, rows: int = 2, length: int | None = None, batch: str | None = None, cuts: Sequence[str] = ()
) -> Verdict | None:
    """Compare the captured layers of a named model with the model, filled for that; None if it is too large."""
    if ":" in name:
        build, example = function(name), None if batch is None else function(batch)(0)
    else:
        found = model_file(name)
        build, length = found.build, min(found.length, length or TOKENS)
        example = None
    sketched = sketch(build)
    model = sketched.model
    if example is None:
        example = _drawn(model, _example(model, max(rows, 2), length or TOKENS))
    flat = flatten(model, example)
    verdict = verdict_of(Start(sketched, flat, example, stages, list(cuts) or None))
    return None if verdict is None else verdict[0]


def _drawn(model: Any, example: dict[str, Tensor]) -> dict[str, Tensor]:
    """An example with values that differ: tokens, pictures and classes at random."""
    drawn, config = torch.Generator().manual_seed(0), model.config
    for name, t in example.items():
        if t.is_floating_point():
            example[name] = torch.randn(t.shape, generator=drawn)
        elif name != "attention_mask":
            most = config.num_labels if name == "labels" and "Classification" in type(model).__name__ else config.vocab_size
            example[name] = torch.randint(0, most, t.shape, generator=drawn)
    return example


def weightless(name: str, *, rows: int = 2, length: int | None = None, batch: str | None = None) -> ModelGraph:
    """Capture a preset, a file or what a function returns, on meta."""
    if rows < 1 or (length is not None and length < 1):
        raise MeshwrightError(
            f"an example has at least one row and one token, got {rows} and {length}", fix="--rows 2 --length 64"
        )
    if ":" in name:
        if batch is None:
            raise MeshwrightError(f"{name} needs an example of its data", fix="--batch package.module:function")
        example: Any = function(batch)(0)
        with torch.device("meta"):
            model = function(name)()
    else:
        found = model_file(name)
        with torch.device("meta"):
            model = found.build()
        example = _example(model, rows, min(found.length, length or TOKENS))
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList):
        raise MeshwrightError(
            f"{name} gives {type(model).__name__}: a list of layers is cut as it is, there is nothing to capture",
            fix="a function that returns one module",
        )
    return capture(model, example)


def _example(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """A batch for a model of transformers, by what it says of its main input and its task."""
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
            f"{type(model).__name__} takes {model.main_input_name!r}, of which no example can be made up",
            fix="package.module:function with --batch",
        )
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _refuse_size(*sizes: int) -> None:
    """An example is small: it says what layers look like, not how much there is to train on."""
    if (elements := prod(sizes)) > LARGEST_EXAMPLE:
        shape = " x ".join(map(str, sizes))
        raise MeshwrightError(
            f"an example of {shape} has {elements} elements, at most {LARGEST_EXAMPLE} are made", fix="--rows 2 --length 64"
        )
