"""Tensor modes by name: a mode is a file of this folder that has a grid, a scheme and its closed form."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from meshwright.costs.scheme import Grid, Save, Scheme, TensorRequest, Words
from meshwright.errors import MeshwrightError, did_you_mean


class TensorMode(Protocol):
    """What the file of a mode has."""

    def grid(self, asked: TensorRequest) -> Grid:
        """The axes of the mode and their sizes."""

    def scheme(self, grid: Grid, *, save: Save = ...) -> Scheme:
        """Which axes cut what."""

    def layer_words(self, grid: Grid, *, batch: int, sequence: int, hidden: int, save: Save = ...) -> Words:
        """The words of one transformer layer in closed form."""


@cache
def names() -> tuple[str, ...]:
    """The modes that there are, by the names of their files."""
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("_"))
    return tuple(path.stem for path in files if "\ndef layer_words(" in path.read_text())


def mode(name: str) -> TensorMode:
    """A mode by its name."""
    if name not in names():
        raise MeshwrightError(f"no tensor mode {name!r}{did_you_mean(name, names())}", fix=f"one of {', '.join(names())}")
    found: Any = import_module(f"meshwright.costs.{name}")
    return cast(TensorMode, found)
