"""Own schedules: what a user names as a file, or as `package.module:function`.

A function takes `workers`, `microbatches`, `steps`, `costs` and `cluster` as builders do, each only if it names it, and
whatever else it takes is an option.
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
    """A schedule from a JSON file, or from torch's CSV."""
    text = file_text(path, "the schedule", fix="meshwright show NAME --format json -o FILE")
    return from_csv(text, path.stem) if path.suffix == ".csv" else schedule_from_json(text)


def own_builder(name: str) -> Callable[..., Schedule]:
    """A user's function as a builder: what it raises, and what is no schedule, is said."""
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
    """The arguments of a build function that can be given by name, with their types where it says them."""
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
    """What is no schedule at all, or too large to be one; laws come later."""
    for fault in faults(schedule):
        raise MeshwrightError(f"{name} breaks the law of placement: {fault}", fix="meshwright check")
    entries = sum(len(row) for lists in (schedule.prologue, schedule.period, schedule.drain) for row in lists)
    if entries * max(schedule.repeats, 1) > LARGEST:
        raise MeshwrightError(f"{name} has {entries} entries, {schedule.repeats} times; at most {LARGEST} are run")
    return schedule
