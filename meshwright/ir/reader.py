"""Strict readers for the file forms. They reject every value that has the wrong type or range, and name its key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import refuse_unfit, shown

LARGEST = 1_000_000_000
"""Upper limit of any count in a file."""


def parsed(text: str, what: str) -> Any:
    """Parses JSON; `what` names the expected content in errors."""
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, what))
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(
            f"this is not {what}: it is not JSON ({str(error)[:200]})", fix=f"see the documentation for the format of {what}"
        ) from error
    refuse_unfit(found, what)
    return found


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Builds an object and raises on a duplicate key; JSON alone would silently keep the last one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MeshwrightError(f"{what} has the key '{key[:80]}' twice", fix="give it once")
        found[key] = value
    return found


class Reader:
    """Reads the keys of an object one by one; `keys` are all keys that it may have."""

    def __init__(self, data: Any, what: str, *, kind: str | None, schema: int, keys: frozenset[str]) -> None:
        if not isinstance(data, Mapping):
            raise MeshwrightError(
                f"this is not {what}: it is not an object", fix=f"see the documentation for the format of {what}"
            )
        self.data, self.what = data, what
        if kind is not None and data.get("kind") != kind:
            raise MeshwrightError(f"this is not {what}: its kind is {shown(data.get('kind'))}", fix=f'"kind": "{kind}"')
        if "schema" in data or kind is not None:
            found = data.get("schema")
            if type(found) is not int or found < 1:
                raise MeshwrightError(
                    f"{what} has schema {shown(found)}, which is not a schema number", fix=f'"schema": {schema}'
                )
            if found > schema:
                raise MeshwrightError(f"{what} has schema {found}, this version reads up to {schema}", fix="update meshwright")
        if unknown := sorted(map(str, set(data) - keys)):
            raise MeshwrightError(f"{what} has unknown keys: {', '.join(unknown)[:400]}", fix=f"keys: {', '.join(sorted(keys))}")

    @property
    def _fix(self) -> str:
        return f"see the documentation for the format of {self.what}"

    def __call__(self, key: str, convert: Callable[[Any], Any], *default: Any) -> Any:
        """Returns the converted value of a key, or the default if the key is missing."""
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
    """Returns a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300 or not isfinite(value):
        raise MeshwrightError(f"{shown(value)} is not a number of at least 0")
    return float(value)


def count(value: Any) -> int:
    """Returns a whole number >= 0."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise MeshwrightError(f"{shown(value)} is not a count")
    return value


def positive(value: Any) -> int:
    """Returns a whole number >= 1."""
    if count(value) < 1:
        raise MeshwrightError(f"{value!r} is not at least 1")
    return int(value)


def flag(value: Any) -> bool:
    """Returns True or False."""
    if not isinstance(value, bool):
        raise MeshwrightError(f"{shown(value)} is neither true nor false")
    return value


def text(value: Any) -> str:
    """Returns a string."""
    if not isinstance(value, str):
        raise MeshwrightError(f"{shown(value)} is not a text")
    return value


def rows(value: Any) -> list[Any]:
    """Returns a list."""
    if not isinstance(value, list):
        raise MeshwrightError(f"{shown(value)} is not a list")
    return value


def table(value: Any) -> Mapping[str, Any]:
    """Returns a mapping."""
    if not isinstance(value, Mapping):
        raise MeshwrightError(f"{shown(value)} is not a table")
    return value
