"""Schedules of users: a file, or a function named as `package.module:function`.

A function may take `workers`, `microbatches`, `steps`, `costs` and `cluster`, each only if it names it. Its other arguments
are options.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from traceback import format_exception
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.files.schedule_csv import from_csv
from meshwright.ir.files.schedule_json import LARGEST, schedule_from_json
from meshwright.ir.imported_function import function, own_frames
from meshwright.ir.input_limits import file_text
from meshwright.ir.schedule import Schedule
from meshwright.passes.wellformed import faults


def read(path: Path) -> Schedule:
    """Reads a schedule from a JSON file or from torch's CSV."""
    text = file_text(path, "the schedule", fix="meshwright show NAME --format json -o FILE")
    return from_csv(text, path.stem) if path.suffix == ".csv" else schedule_from_json(text)


def own_builder(name: str) -> Callable[..., Schedule]:
    """Returns a user's function as a builder. Wraps its exceptions, and raises if it does not return a schedule."""
    found = function(name)

    @wraps(found)
    def build(**given: Any) -> Schedule:
        try:
            schedule = found(**given)
        except MeshwrightError:
            raise
        except Exception as error:
            where = "".join(format_exception(type(error), error, own_frames(error.__traceback__, __file__))).rstrip()
            raise MeshwrightError(f"{name} raised {type(error).__name__}: {error}\n{where}") from error
        if not isinstance(schedule, Schedule):
            raise MeshwrightError(f"{name} returned {type(schedule).__name__}", fix="return a meshwright.Schedule")
        return refuse_malformed(schedule, name)

    return build


def parameters_of(found: Callable[..., Schedule]) -> dict[str, inspect.Parameter]:
    """Returns the arguments of a build function that can be given by name, with their type annotations if it has any."""
    try:
        hints = typing.get_type_hints(found)
    except (NameError, TypeError, AttributeError):
        hints = {}
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {
        key: p.replace(annotation=hints.get(key, p.empty))
        for key, p in inspect.signature(found).parameters.items()
        if p.kind in by_name
    }


def refuse_malformed(schedule: Schedule, name: str) -> Schedule:
    """Raises if this is not a well-formed schedule or if it is too large. Laws are checked later."""
    for fault in faults(schedule):
        raise MeshwrightError(f"{name} breaks the law of placement: {fault}", fix="meshwright check")
    entries = sum(len(row) for lists in (schedule.prologue, schedule.period, schedule.drain) for row in lists)
    if entries * max(schedule.repeats, 1) > LARGEST:
        raise MeshwrightError(f"{name} has {entries} entries, {schedule.repeats} times; the limit is {LARGEST}")
    return schedule
