"""A plan as a file: what a user asks for (`Parallel`), in JSON or TOML, with a schema number.

schema = 1
[parallel]
pp = 4
schedule = "chimera"
microbatches = 8
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.limits import file_text, shown, toml
from meshwright.ir.plan import Parallel
from meshwright.ir.reading import Reader, parsed

SCHEMA = 1
WHAT = "a plan file"


def plan_to_json(parallel: Parallel) -> str:
    """The file form of a plan."""
    return json.dumps({"schema": SCHEMA, "parallel": asdict(parallel)}, indent=1)


def plan_from_json(text: str) -> Parallel:
    """Read a plan."""
    return Parallel.of(_table(parsed(text, WHAT)))


def read_plan(path: str | Path) -> dict[str, Any]:
    """What a plan file asks for, key by key, as it was written."""
    path = Path(path)
    text = file_text(path, "the plan", fix="parallel=dict(pp=2), or a JSON or TOML file")
    found = _table(toml(text, f"the plan {path}") if path.suffix == ".toml" else parsed(text, WHAT))
    Parallel.of(found)
    return found


def asked(given: Parallel | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """What `parallel=` asks for, key by key: a Parallel, a mapping, JSON text, or a plan file; None is one process."""
    if given is None:
        return {}
    if isinstance(given, Parallel):
        return asdict(given)
    if isinstance(given, str) and given == "auto":
        raise MeshwrightError(
            'parallel="auto" needs the planner, which does not exist yet', fix='parallel=dict(pp=4, schedule="chimera")'
        )
    if isinstance(given, str) and given.lstrip().startswith("{"):
        data = parsed(given, "a plan")
        given = _table(data) if isinstance(data, dict) and "parallel" in data else data
    if isinstance(given, str | Path):
        return read_plan(given)
    Parallel.of(given)
    return dict(given)


def _table(data: Any) -> dict[str, Any]:
    """The one table of the file."""
    found = Reader(data, WHAT, kind=None, schema=SCHEMA, keys=frozenset({"schema", "parallel"}))("parallel", _mapping)
    if "schema" not in data:
        raise MeshwrightError(f"{WHAT} has no 'schema'", fix=f'"schema": {SCHEMA}')
    return dict(found)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MeshwrightError(f"{shown(value)} is no table")
    return value
