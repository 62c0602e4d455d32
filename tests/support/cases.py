"""Every schedule at many sizes with every small set of options: the tables that law tests run over.

Schedules, options and the sets worth comparing are asked for by name, so a new file under `schedules/` is tested without a
line here. What a schedule refuses (with a MeshwrightError) is no case; anything else that it raises fails the test.
`schedule_files` draws files that can be read, of schedules that mostly cannot run.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from hypothesis import strategies as st

from meshwright import MeshwrightError, Schedule, lower, schedule_to_json, schedules

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


@cache
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
    """The same lists as they stand, without periods that repeat."""
    return schedule.with_lists(schedule.lists)


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
    sizes = {"workers": case.workers, "microbatches": case.microbatches, "steps": steps or usual_steps(case.name)}
    return schedules.build(case.name, **sizes, **dict(case.options))


def usual_steps(name: str) -> int:
    """As on the command line: one step, or four of a schedule without a flush."""
    return 4 if "steps" in schedules.parameters(name) else 1


LETTERS = "FFFBBBIWRSUNG"


@st.composite
def words(draw: st.DrawFn, *, stages: int, workers: int, transfers: bool = True) -> str:
    """One entry as text, near the given sizes but not always inside them."""
    kind = draw(st.sampled_from("aaaaact" if transfers else "aaaaa"))
    if kind == "c":
        return f"[{draw(_action_words(stages))}|{draw(_action_words(stages))}]"
    if kind == "a":
        return draw(_action_words(stages))
    what = draw(st.sampled_from(["act", "act", "grad", "grad", "saved", "partial", "sum", "param", "turn", "wgrad"]))
    tail = draw(st.sampled_from(["", "#1", "@1", ".0", "~0", "~1", "#1~0"]))
    number = "" if what in ("partial", "sum", "param") else str(draw(st.integers(0, 3)))
    return f"{draw(st.integers(0, stages))}{what}{number}{tail}{draw(st.sampled_from('<>'))}{draw(st.integers(0, workers))}"


@st.composite
def _action_words(draw: st.DrawFn, stages: int) -> str:
    op = draw(st.sampled_from(LETTERS))
    stage = "" if op == "N" else str(draw(st.integers(0, stages if draw(st.integers(0, 9)) == 0 else stages - 1)))
    mb = str(draw(st.integers(0, 3))) if op in "FBIWR" else ""
    return f"{stage}{op}{mb}{draw(st.sampled_from(['', '', '', '', '', '@1', '#1', '.0', '.1']))}"


@st.composite
def _wild_file(draw: st.DrawFn) -> dict[str, Any]:
    """Random teams and random lists."""
    stages, most = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    team = st.lists(st.integers(0, most - 1), min_size=1, max_size=2, unique=True)
    copy = st.lists(st.lists(team, min_size=1, max_size=2), min_size=stages, max_size=stages)
    placement = draw(st.lists(copy, min_size=1, max_size=2))
    workers = 1 + max(w for copy in placement for teams in copy for team in teams for w in team)
    lists = st.lists(
        st.lists(words(stages=stages, workers=workers), max_size=6).map(" ".join), min_size=workers, max_size=workers
    )
    data: dict[str, Any] = {"schema": 1, "kind": "schedule", "name": "wild", "placement": placement, "period": draw(lists)}
    data["microbatches"] = draw(st.integers(1, 3))
    for key, segment in (("prologue", lists), ("drain", lists), ("rows", st.integers(0, 3))):
        if draw(st.integers(0, 3)) == 0:
            data[key] = draw(segment)
    return data


@st.composite
def _near_file(draw: st.DrawFn) -> dict[str, Any]:
    """A schedule that can run, with a few words dropped, doubled, swapped or replaced."""
    case = draw(st.sampled_from(tiny()))
    schedule = case.build(steps=draw(st.integers(2, 4)))
    data: dict[str, Any] = json.loads(schedule_to_json(lower(schedule) if draw(st.booleans()) else schedule))
    for _ in range(draw(st.integers(0, 2))):
        there = [data[key] for key in ("period", "prologue", "drain") if data.get(key)]
        if not there:
            break
        lists = draw(st.sampled_from(there))
        worker = draw(st.integers(0, len(lists) - 1))
        entries = lists[worker].split()
        at, other = (draw(st.integers(0, max(0, len(entries) - 1))) for _ in range(2))
        match draw(st.sampled_from(["drop", "double", "swap", "replace", "empty"])):
            case "drop":
                entries[at : at + 1] = []
            case "double":
                entries[at:at] = entries[other : other + 1]
            case "swap" if entries:
                entries[at], entries[other] = entries[other], entries[at]
            case "replace":
                entries[at : at + 1] = [draw(words(stages=schedule.stages, workers=schedule.workers))]
            case "empty" if draw(st.integers(0, 4)) == 0:
                lists.clear()
        if lists:
            lists[worker] = " ".join(entries)
    return data


@st.composite
def schedule_files(draw: st.DrawFn) -> dict[str, Any]:
    """The content of a schedule file whose keys and types are right; most break a law, some hold all of them."""
    data = draw(st.one_of(_near_file(), _wild_file()))
    stages = len(data["placement"][0])
    action = _action_words(stages)
    stage_list = st.lists(st.integers(0, stages), max_size=3)
    extras: dict[str, st.SearchStrategy[Any]] = {
        "repeats": st.integers(0, 3),
        "first": st.integers(0, 2),
        "options": st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.booleans(), st.text(max_size=5), st.none())),
        "parts": st.integers(1, 3),
        "ties": st.lists(stage_list, max_size=2),
        "recompute": st.lists(
            st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=stages, max_size=stages + draw(st.integers(0, 1))
        ),
        "turns": st.lists(st.tuples(action, action), max_size=3),
        "channels": st.lists(
            st.tuples(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.lists(action, max_size=4).map(" ".join)), max_size=2
        ),
        "flush": st.booleans(),
        "ring": st.booleans(),
        "lowered": st.booleans(),
    }
    for key in draw(st.lists(st.sampled_from(sorted(extras)), max_size=3, unique=True)):
        data[key] = draw(extras[key])
    return data
