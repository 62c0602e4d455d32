"""Makes batches for a model without data: random tokens or pictures with the shapes of its configuration.

data = batches_for(resolve_model("gpt-tiny"), None, rows=8)
data(0), data(1)        different values for each step, the same in every process
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.imported_function import function
from meshwright.train.models.model_names import NamedModel

TOKENS = 64
"""The default number of tokens per row; fewer if the model has fewer positions."""
LARGEST_EXAMPLE = 1 << 27
"""The largest number of elements in a column: one gigabyte of tokens."""
BYTES = 256
"""The tokens of a text that is read byte by byte."""
SMALL_ROWS = 32
"""The smallest number of rows in a batch of a small model."""


@dataclass(frozen=True)
class DrawnColumn:
    """One column of a batch: normal random numbers if `below` is None, else random integers from `first` to `below` - 1."""

    name: str
    shape: tuple[int, ...]
    first: int = 0
    below: int | None = None


@dataclass(frozen=True)
class DrawnBatch:
    """A function batch(step) with random values. It is data, so it can be sent to workers."""

    columns: tuple[DrawnColumn, ...]

    def __call__(self, step: int) -> dict[str, Tensor]:
        """Return the batch of a step."""
        random = torch.Generator().manual_seed(step)
        return {column.name: _draw(column, random) for column in self.columns}


def _draw(column: DrawnColumn, random: torch.Generator) -> Tensor:
    if column.below is None:
        return torch.randn(column.shape, generator=random)
    return torch.randint(column.first, column.below, column.shape, generator=random)


def batches_for(model: NamedModel, batch: str | None, *, rows: int, length: int | None = None) -> Callable[[int], Any]:
    """Return the function that makes the batches of a named model: the user's, the model's own data, or random values."""
    if model.batch is not None:
        if batch is not None or length is not None:
            flag = "--length" if batch is None else "--batch-function"
            raise MeshwrightError(f"{model.name} has its own data, {flag} is for other models", fix=f"leave {flag} out")
        return partial(model.batch, rows=max(SMALL_ROWS, rows))
    if batch is not None:
        if length is not None:
            raise MeshwrightError(f"{batch} decides the number of tokens; --length is for models by name")
        return function(batch)
    if model.is_own:
        raise MeshwrightError(f"{model.name} needs data to train on", fix="--batch-function package.module:function")
    with torch.device("meta"):
        built = model.build()
    return example_for(model.name, built, rows=rows, length=length)


def example_for(name: str, model: Any, *, rows: int, length: int | None = None) -> DrawnBatch:
    """Return random batches for a model of transformers, from its main input and its task."""
    if length is not None and length < 1:
        raise MeshwrightError(f"a row needs at least 1 token, got --length {length}", fix=f"--length {TOKENS}")
    length = _length(name, model, length)
    kind = type(model).__name__
    classes = "Classification" in kind
    labels = (rows,) if classes and "Token" not in kind else (rows, length)
    _refuse_size(*labels)
    target = DrawnColumn("labels", labels, below=_number(model, "num_labels" if classes else "vocab_size"))
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (rows, getattr(model.config, "num_channels", 3), height, width)
        _refuse_size(*shape)
        return DrawnBatch((DrawnColumn("pixel_values", shape), target))
    if model.main_input_name != "input_ids":
        raise MeshwrightError(
            f"{kind} takes {model.main_input_name!r}, for which no example can be made",
            fix="use package.module:function with --batch-function",
        )
    tokens = DrawnColumn("input_ids", (rows, length), below=_number(model, "vocab_size"))
    return DrawnBatch((tokens, DrawnColumn("attention_mask", (rows, length), first=1, below=2), target))


def dataset_for(model: Any) -> str | None:
    """Return the built-in data set that a model of transformers can be trained on; None if there is none.

    Rows of `stdlib` are bytes with themselves as labels, which a language model with at least 256 tokens takes.
    """
    if not hasattr(model, "main_input_name") or not hasattr(model, "config"):
        return None
    if model.main_input_name == "pixel_values":
        wanted = {"image_size": 8, "num_channels": 1, "num_labels": 10}
        return "digits" if all(getattr(model.config, name, None) == size for name, size in wanted.items()) else None
    writes = model.main_input_name == "input_ids" and model.get_output_embeddings() is not None
    return "stdlib" if writes and _number(model, "vocab_size") >= BYTES else None


def _number(model: Any, name: str) -> int:
    """Return a number of the configuration or of its text part; 1 if there is none, because id 0 always exists."""
    found = getattr(model.config, name, None) or getattr(model.config.get_text_config(), name, None)
    return found if isinstance(found, int) and found > 0 else 1


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
            f"an example of {shape} has {elements} elements, the limit is {LARGEST_EXAMPLE}", fix="--rows 2 --length 64"
        )
