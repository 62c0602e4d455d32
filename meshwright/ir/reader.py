"""Strict readers for the file forms: whatever is not exactly what it should be is refused, with the key that it stands under."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import refuse_unfit, shown

LARGEST = 1_000_000_000
"""No count in a file is larger."""


def parsed(text: str, what: str) -> Any:
    """The JSON in a text, or an error that says what was expected there."""
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, what))
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(
            f"this is not {what}: it is not JSON ({str(error)[:200]})", fix=f"see the documentation for the form of {what}"
        ) from error
    refuse_unfit(found, what)
    return found


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    """An object whose keys are all different: JSON alone would silently take the last of two."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MeshwrightError(f"{what} has the key '{key[:80]}' twice", fix="give it once")
        found[key] = value
    return found


class Reader:
    """Reads the keys of an object one after another; `keys` are all it may have."""

    def __init__(self, data: Any, what: str, *, kind: str | None, schema: int, keys: frozenset[str]) -> None:
        if not isinstance(data, Mapping):
            raise MeshwrightError(f"this is not {what}: it is no object", fix=f"see the documentation for the form of {what}")
        self.data, self.what = data, what
        if kind is not None and data.get("kind") != kind:
            raise MeshwrightError(f"this is not {what}: its kind is {shown(data.get('kind'))}", fix=f'"kind": "{kind}"')
        if "schema" in data or kind is not None:
            found = data.get("schema")
            if type(found) is not int or found < 1:
                raise MeshwrightError(f"{what} has schema {shown(found)}, which is no schema number", fix=f'"schema": {schema}')
            if found > schema:
                raise MeshwrightError(f"{what} has schema {found}, this version reads up to {schema}", fix="update meshwright")
        if unknown := sorted(map(str, set(data) - keys)):
            raise MeshwrightError(f"{what} has unknown keys: {', '.join(unknown)[:400]}", fix=f"keys: {', '.join(sorted(keys))}")

    @property
    def _fix(self) -> str:
        return f"see the documentation for the form of {self.what}"

    def __call__(self, key: str, convert: Callable[[Any], Any], *default: Any) -> Any:
        """The value under a key, converted; its default where it is left out."""
        if key not in self.data:
            if default:
                return default[0]
            raise MeshwrightError(f"{self.what} has no '{key}'", fix=self._fix)
        try:
            return convert(self.data[key])
        except MeshwrightError as error:
            raise MeshwrightError(f"'{key}' of {self.what}: {error.what}", fix=error.fix or self._fix) from error
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            raise MeshwrightError(f"'{key}' of {self.what} is malformed: {error}", fix=self._fix) from error


def number(value: Any) -> float:
    """A finite number of at least zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300 or not isfinite(value):
        raise MeshwrightError(f"{shown(value)} is not a number of at least 0")
    return float(value)


def count(value: Any) -> int:
    """A whole number of at least zero."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise MeshwrightError(f"{shown(value)} is not a count")
    return value


def positive(value: Any) -> int:
    """A whole number of at least one."""
    if count(value) < 1:
        raise MeshwrightError(f"{value!r} is not at least 1")
    return int(value)


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise MeshwrightError(f"{shown(value)} is neither true nor false")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise MeshwrightError(f"{shown(value)} is not a text")
    return value


def rows(value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise MeshwrightError(f"{shown(value)} is not a list")
    return value
