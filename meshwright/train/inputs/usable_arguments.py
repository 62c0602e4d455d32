"""Checks arguments for Hugging Face: their types must be those of its fields, and its errors become MeshwrightErrors.

Its classes and factories accept most values without a check, and fail later with errors that do not name the argument.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, time
from tempfile import TemporaryFile
from typing import Any

from meshwright.errors import MeshwrightError

_RAISED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, ImportError, OSError, RuntimeError)
"""The errors that wrong arguments and missing packages cause."""

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, date, time)
"""Types of values in files, flags and scripts. Objects of other classes are not checked here."""


@contextmanager
def usable(what: str, *, fix: str | None = None) -> Iterator[None]:
    """Wraps a call of Hugging Face's code. Its error becomes a MeshwrightError that says that `what` cannot be used, and why."""
    try:
        yield
    except _RAISED as error:
        raise MeshwrightError(f"{what} cannot be used: {str(error)[:500] or type(error).__name__}", fix=fix) from error


def refuse_kinds(values: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
    """Refuses plain values whose type differs from the declared type. None is always allowed."""
    for name, value in values.items():
        if name in declared and isinstance(value, _PLAIN) and not _fits(value, declared[name]):
            raise MeshwrightError(f"{name} must be {_shown(declared[name])}, got {type(value).__name__} {repr(value)[:60]}")


def refuse_folder(what: str, folder: str | os.PathLike[str]) -> None:
    """Creates an output folder and checks that files can be created in it, before training produces anything to write."""
    try:
        os.makedirs(folder, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise MeshwrightError(
            f"{what} {str(folder)[:200]!r} cannot be written to: {getattr(error, 'strerror', None) or error}",
            fix="a folder in which files can be created",
        ) from error


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether a value has the declared type. An int is also a float, 0 and 1 are also bools, a tuple is also a list."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if kind is bool:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if kind in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if list in (kind, origin):
        return isinstance(value, list | tuple | set | frozenset) and (inner != (str,) or all(isinstance(v, str) for v in value))
    if dict in (kind, origin):
        return isinstance(value, dict)
    return not isinstance(kind, type) or isinstance(value, kind)


def _shown(kind: Any) -> str:
    """Returns a declared type as text for an error."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_shown(each) for each in inner)
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", dict: "a mapping", list: "a list"}
    more = " of strings" if origin is list and inner == (str,) else ""
    known = words.get(origin or kind, "None" if kind is type(None) else getattr(kind, "__name__", str(kind)))
    return f"{known}{more}"
