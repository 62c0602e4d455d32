"""Tensor modes by name. A mode is a file of this folder with `grid`, `scheme` and `layer_words`, and a twin in `tensor/`.

A file with these three functions is found by its name and needs no registration."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from meshwright.costs.scheme import Grid, Save, Scheme, TensorRequest, Words
from meshwright.errors import MeshwrightError, did_you_mean


class TensorMode(Protocol):
    """The functions that the file of a mode has."""

    def grid(self, asked: TensorRequest) -> Grid:
        """Returns the axes of the mode and their sizes."""

    def scheme(self, grid: Grid, *, save: Save = ...) -> Scheme:
        """Returns which axes cut which dimensions."""

    def layer_words(self, grid: Grid, *, batch: int, sequence: int, hidden: int, save: Save = ...) -> Words:
        """Returns the words of one transformer layer in closed form."""


@cache
def names() -> tuple[str, ...]:
    """Returns the names of all modes, which are the names of their files."""
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("_"))
    return tuple(path.stem for path in files if "\ndef layer_words(" in path.read_text())


def mode(name: str) -> TensorMode:
    """Returns the mode with this name."""
    if name not in names():
        raise MeshwrightError(f"no tensor mode {name!r}{did_you_mean(name, names())}", fix=f"one of {', '.join(names())}")
    found: Any = import_module(f"meshwright.costs.{name}")
    return cast(TensorMode, found)
