"""Each file here is a schedule; its file name is what users type. `build` finds it, checks the options and calls it.

A schedule file has one function `build(*, workers, microbatches, ...) -> Schedule`. Its other keyword arguments are its
options; `steps`, `first`, `costs` and `cluster` are passed only if it takes them. A schedule with a flush builds one step. A
user's own function `package.module:function` can be used wherever a name can; it may leave out sizes.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import isfinite, nan, prod
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ir.cluster import Cluster
from meshwright.ir.files.schedule_json import LARGEST
from meshwright.ir.input_limits import shown
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, rows_for
from meshwright.schedules._orders.user_schedule import own_builder, parameters_of, read, refuse_malformed

__all__ = [
    "build",
    "builder",
    "capped",
    "compared",
    "converted",
    "names",
    "needed",
    "options",
    "parameters",
    "read",
    "refuse_malformed",
    "shaped",
    "summary",
    "values_of",
    "with_order",
]

GIVEN = ("workers", "microbatches", "steps", "first", "costs", "cluster")
"""Arguments that are not options."""


def names() -> list[str]:
    """The names of all schedules.

    Returns:
        The names, sorted. Each is a file in `meshwright/schedules/`.

    Examples:
        >>> from meshwright import schedules
        >>> "chimera" in schedules.names()
        True
    """
    return list(_files())


@cache
def _files() -> tuple[str, ...]:
    """The names of the schedule files, listed once: a search builds thousands of schedules."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_")))


def builder(name: str) -> Callable[..., Schedule]:
    """Returns the build function of a schedule."""
    if isinstance(name, str) and ":" in name:
        return own_builder(name)
    if not isinstance(name, str) or name not in names():
        raise MeshwrightError(f"there is no schedule '{name}'{did_you_mean(name, names())}", fix=", ".join(names()))
    found: Callable[..., Schedule] = importlib.import_module(f"{__name__}.{name}").build
    return found


def summary(name: str) -> str:
    """Describe a schedule in one line.

    Args:
        name: The schedule.

    Returns:
        The first line of its file.

    Examples:
        >>> from meshwright import schedules
        >>> schedules.summary("gpipe").startswith("GPipe")
        True
    """
    builder(name)
    return (importlib.import_module(f"{__name__}.{name}").__doc__ or "").partition("\n")[0]


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """Returns all keyword arguments of a schedule's build function, with their types."""
    found = builder(name)
    return parameters_of(found) if ":" in name else dict(_file_parameters(name))


@cache
def _file_parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return parameters_of(builder(name))


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a schedule.

    Args:
        name: A schedule, or `package.module:function`.

    Returns:
        The keyword arguments of its build function, without sizes and costs.

    Examples:
        >>> from meshwright import schedules
        >>> list(schedules.options("interleaved"))
        ['chunks']
    """
    return {key: parameter for key, parameter in parameters(name).items() if key not in GIVEN}


def needed(name: str) -> frozenset[str]:
    """Returns the arguments of a build function that have no default."""
    return frozenset(key for key, parameter in parameters(name).items() if parameter.default is parameter.empty)


def capped(name: str) -> dict[str, object] | None:
    """Returns the options under which a schedule uses its option `memory` (its CAPPED); None if it has no such option."""
    found: dict[str, object] = getattr(_module(name), "CAPPED", {})
    return found if "memory" in options(name) else None


def compared(name: str) -> tuple[dict[str, object], ...]:
    """Returns the sets of options worth comparing: COMPARED of the schedule file, or only the defaults."""
    found: tuple[dict[str, object], ...] = getattr(_module(name), "COMPARED", ({},))
    return found


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(name.partition(":")[0] if ":" in name else f"{__name__}.{name}")


def build(
    name: str,
    *,
    workers: int,
    microbatches: int,
    steps: int = 1,
    first: int = 0,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
    **chosen: object,
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: A schedule, or `package.module:function`.
        workers: Workers of one pipeline.
        microbatches: Microbatches of one step.
        steps: How many steps the lists hold.
        first: The number of the first round, if the lists continue a run of a schedule that can be continued.
        costs: One cost for each stage, for schedules whose order depends on them.
        cluster: The links between workers, for the same schedules.
        **chosen: Options of the schedule. Texts are converted to the declared types.

    Returns:
        The schedule, not lowered.

    Raises:
        MeshwrightError: There is no such schedule or option, or it does not run at these sizes.

    Examples:
        >>> from meshwright import schedules
        >>> schedule = schedules.build("zero_bubble", workers=4, microbatches=8, variant="h1")
        >>> schedule.name, schedule.workers
        ('zero_bubble', 4)
    """
    for what, count, least in (
        ("workers", workers, 1),
        ("microbatches", microbatches, 1),
        ("steps", steps, 1),
        ("first", first, 0),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise MeshwrightError(f"{what} must be a whole number of at least {least}, got {count!r}", fix=f"{what}=4")
    values = converted(name, chosen)
    parts = prod(value for key, value in values.items() if key in ("chunks", "waves") and isinstance(value, int))
    if (size := 2 * workers * microbatches * steps * max(parts, 1)) > LARGEST:
        options = "".join(f", {key}={value}" for key, value in values.items())
        raise MeshwrightError(
            f"{workers} workers, {microbatches} microbatches and {steps} steps{options} make {size} actions, "
            f"the limit is {LARGEST}",
            fix="fewer steps, stages or microbatches: one period describes training of any length",
        )
    takes = parameters(name)
    if first and "first" not in takes:
        raise MeshwrightError(f"{name} cannot continue a run at round {first}", fix="first=0, or a schedule such as cyclic")
    given = {"steps": steps, "first": first, "costs": costs, "cluster": cluster}
    extra: dict[str, object] = {key: value for key, value in given.items() if key in takes}
    extra |= {key: value for key, value in {"workers": workers, "microbatches": microbatches}.items() if key in takes}
    schedule = builder(name)(**extra, **values)
    schedule = replace(schedule, options=tuple(sorted(values.items())))
    return schedule if "steps" in takes or not schedule.flush else schedule.repeated(steps)


def shaped(
    name: str, *, costs: Callable[[Schedule], Sequence[StageCost] | None], cluster: Cluster | None = None, **given: Any
) -> Schedule:
    """Builds a schedule by name with `costs(schedule)`. It is first built without costs, to know the number of stages."""
    schedule = build(name, **given)
    found = costs(schedule) if "costs" in parameters(name) else None
    if found is None and (cluster is None or "cluster" not in parameters(name)):
        return schedule
    return build(name, costs=found, cluster=cluster, **given)


def with_order(parallel: Parallel, cluster: Cluster | None = None) -> Parallel:
    """Returns a plan with its own lists as `order`, not widened yet, if its schedule takes costs.

    Where the plan runs they would otherwise be built again, with other costs. Worker w is device w of the cluster.
    """
    name, rows = parallel.schedule, parallel.costs
    if parallel.order is not None or parallel.mode.is_cyclic or "costs" not in parameters(name):
        return parallel
    sizes = {"workers": parallel.pp, "microbatches": parallel.microbatches}
    wanted = {**sizes, **parallel.options}
    built = shaped(name, costs=lambda s: rows_for(rows, s.stages) if rows else None, cluster=cluster, **wanted)
    kept = {key: value for key, value in parallel.given().items() if key not in ("schedule", "options")}
    return Parallel.of({**kept, "order": built}) if built.flush else parallel


def converted(name: str, chosen: Mapping[str, object]) -> dict[str, object]:
    """Returns the options in their declared types. Raises on an unknown schedule, option or value."""
    known = options(name)
    if unknown := sorted(set(chosen) - set(known)):
        listed = ", ".join(f"{key}={values_of(p)}" for key, p in known.items()) or f"{name} has no options"
        raise MeshwrightError(f"{name} has no option {', '.join(repr(key) for key in unknown)}", fix=listed)
    return {key: _converted(name, known[key], value) for key, value in chosen.items()}


def _converted(name: str, parameter: inspect.Parameter, value: object) -> object:
    """Returns an option's value in its declared type; `Literal` types list the allowed values."""
    kind = parameter.annotation
    if kind is parameter.empty:  # a user's own function may have no annotations
        return value
    allowed = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    kinds: list[object] = [type(a) for a in allowed[:1]] or [k for k in _members(kind) if k is not type(None)]
    for each in kinds:
        converted = _as(each, value)
        if converted is not None and (not allowed or converted in allowed):
            return converted
    if value is None and type(None) in _members(kind):
        return None
    raise MeshwrightError(
        f"{name}: option {parameter.name} cannot be {shown(value)}", fix=f"{parameter.name}={values_of(parameter)}"
    )


def _members(kind: object) -> tuple[object, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _as(kind: object, value: object) -> object | None:
    """Returns `value`, possibly a text, as bool, int, float or str; None if it cannot be converted."""
    if kind is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if isinstance(value, bool):
        return None
    try:
        if kind is int:
            return int(value) if isinstance(value, int | str) else None
        if kind is float:
            number = float(value) if isinstance(value, int | float | str) else nan
            return number if isfinite(number) else None
    except (ValueError, OverflowError):
        return None
    return value if isinstance(value, str) else None


def values_of(parameter: inspect.Parameter) -> str:
    """Describes the allowed values of an option, for help and errors."""
    kind = parameter.annotation
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(str(a) for a in typing.get_args(kind))
    texts = {bool: "true|false", int: "<whole number>", float: "<number>"}
    return next((text for member, text in texts.items() if member in _members(kind)), "<text>")
