"""Every schedule at many sizes with every small set of options: the tables that law tests run over.

Schedules, options and the sets worth comparing are asked for by name, so a new file under `schedules/` is tested without a
line here. What a schedule refuses (with a MeshwrightError) is no case; anything else that it raises fails the test.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from meshwright import MeshwrightError, Schedule, schedules

SMALL_WORKERS, SMALL_MICROBATCHES = (1, 2, 3, 4), (1, 2, 4)
LARGE_WORKERS, LARGE_MICROBATCHES = (1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 5, 8, 12, 16)
WHOLE_NUMBERS = (1, 2, 3)
"""What an option that is a whole number is tried with, beside its default."""


@dataclass(frozen=True)
class Case:
    """One schedule to build; prints as a test id."""

    name: str
    workers: int
    microbatches: int
    options: tuple[tuple[str, object], ...] = ()

    def build(self, *, steps: int | None = None) -> Schedule:
        """The schedule; built once."""
        return _built(self, steps)

    def __str__(self) -> str:
        chosen = "".join(f"-{key}={value}" for key, value in self.options)
        return f"{self.name}-{self.workers}x{self.microbatches}{chosen}"


def cases(
    workers: Sequence[int] = SMALL_WORKERS,
    microbatches: Sequence[int] = SMALL_MICROBATCHES,
    *,
    names: Iterable[str] | None = None,
    every_option: bool = True,
) -> Iterator[Case]:
    """All cases that build; `every_option=False` takes only the sets of options that a schedule wants compared."""
    for name in schedules.names() if names is None else names:
        for chosen in option_sets(name) if every_option else _compared(name):
            for count, mbs in product(workers, microbatches):
                case = Case(name, count, mbs, chosen)
                if builds(case):
                    yield case


def small() -> list[Case]:
    """Compared options on up to 4 workers: runs in seconds."""
    return list(cases(every_option=False))


def large() -> list[Case]:
    """Everything: for tests marked slow."""
    return list(cases(LARGE_WORKERS, LARGE_MICROBATCHES))


def tiny(*, every_option: bool = True) -> list[Case]:
    """For each schedule and set of options the smallest case with messages in it: for tests that try every place of it.

    Options that make no difference at this size are left out.
    """
    sizes = ((2, 2), (2, 4), (3, 3), (4, 4), (4, 8), (2, 1), (1, 2))
    found: dict[Schedule, Case] = {}
    for name in schedules.names():
        for chosen in option_sets(name) if every_option else _compared(name):
            first = next((case for size in sizes if builds(case := Case(name, *size, chosen))), None)
            if first:
                found.setdefault(replace(first.build(), options=()), first)
    return list(found.values())


def builds(case: Case) -> bool:
    """Does the schedule take these sizes and options?"""
    try:
        _built(case, None)
    except MeshwrightError:
        return False
    return True


def option_sets(name: str) -> list[tuple[tuple[str, object], ...]]:
    """The compared sets of options, then all combinations of small values; each once."""
    known = schedules.options(name)
    combined = [tuple(zip(known, values, strict=True)) for values in product(*map(_values, known.values()))]
    plain = {key: parameter.default for key, parameter in known.items()}
    found = {tuple(sorted({**plain, **dict(chosen)}.items())): chosen for chosen in [*combined, *_compared(name)]}
    return list(found.values())


def flat(schedule: Schedule) -> Schedule:
    """The same lists without prologue, periods and drain."""
    edges = schedule.turn_edges
    return replace(schedule, period=schedule.lists, prologue=(), drain=(), repeats=1, turns=edges)


def _compared(name: str) -> list[tuple[tuple[str, object], ...]]:
    return [tuple(sorted(chosen.items())) for chosen in schedules.compared(name)]


def _values(parameter: inspect.Parameter) -> tuple[object, ...]:
    """A few values of an option, its default first; of a type that is not small only the default."""
    kind = parameter.annotation
    members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    values: list[object] = [] if parameter.default is parameter.empty else [parameter.default]
    for member in members:
        if typing.get_origin(member) is typing.Literal:
            values += typing.get_args(member)
        elif member is bool:
            values += (False, True)
        elif member is int:
            values += WHOLE_NUMBERS
        elif member is type(None):
            values.append(None)
    return tuple(dict.fromkeys(values))


@cache
def _built(case: Case, steps: int | None) -> Schedule:
    return schedules.build(case.name, workers=case.workers, microbatches=case.microbatches, steps=steps, **dict(case.options))
