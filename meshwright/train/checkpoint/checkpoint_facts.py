"""Reads state.json, the facts of a checkpoint, strictly: every error is raised before anything is changed.

The marker contains a digest of the file, so damage is detected earlier. These checks are for files that somebody edited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.train.checkpoint.folders import FACTS, SCHEMA


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint. Raises for anything that `put_back` could not use."""
    path = folder / FACTS
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise MeshwrightError(f"{path} cannot be read: {str(error)[:200]}", fix="resume from another checkpoint") from error
    if not isinstance(known, dict):
        raise MeshwrightError(f"{path} is not an object", fix="resume from another checkpoint")
    schema: Any = known.get("schema")
    if _is_count(schema) and schema > SCHEMA:
        raise MeshwrightError(f"{path} has schema {schema}, this version reads up to {SCHEMA}", fix="update meshwright")
    for key, fits in _FITS.items():
        if key not in known or not fits(known[key]):
            raise MeshwrightError(f"'{key}' of {path} is missing or has the wrong type", fix="resume from another checkpoint")
    groups = len(known["groups"])
    if any(not _is_count(group) or group >= groups for group in known["options"].values()):
        raise MeshwrightError(f"'options' of {path} name groups that do not exist", fix="resume from another checkpoint")
    if not _are_texts(known.get("unread", [])):
        raise MeshwrightError(f"'unread' of {path} is not a list of names", fix="resume from another checkpoint")
    return known


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_seed(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_table_or_none(value: Any) -> bool:
    return value is None or _is_table(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_table, value))


_FITS: dict[str, Callable[[Any], bool]] = {
    "schema": lambda value: _is_count(value) and value > 0,
    "step": _is_count,
    "seed": _is_seed,
    "written_under": _is_table,
    "data": _is_table_or_none,
    "scaler": _is_table_or_none,
    "extra": _is_table_or_none,
    "optimizer": lambda value: value is None or isinstance(value, str),
    "scheduler": lambda _: True,  # a user's own schedule may have any state
    "groups": _are_tables,
    "options": _is_table,
    "counters": lambda value: _is_table(value) and all(map(_is_table, value.values())),
}
"""The check for each key."""
