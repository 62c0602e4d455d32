"""Schedules with something changed, and the two ways to judge them: all are refused, or as the oracle judges them.

The oracle (`oracle.py`) shares no code with the checker. Where a change leaves a schedule legal, its simulation must
agree with the oracle's own clock and count.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings

from meshwright import (
    CheckResult,
    Cluster,
    Link,
    MeshwrightError,
    Placement,
    Schedule,
    StageCost,
    Transfer,
    check,
    lower,
    schedules,
    simulate,
)
from meshwright.ir.action import Entry, parse, parse_value
from meshwright.passes.laws import Law
from tests.support import oracle
from tests.support.cases import Case, flat, tiny
from tests.support.oracle_rules import actions_of

FUZZ = settings(deadline=None, derandomize=True)
SOAK = settings(deadline=None, max_examples=3000)
FORMS = ("plain", "lowered")
TINY, TINY_COMPARED = tiny(), tiny(every_option=False)
SYNCS = ("lazy", "eager", "eager-opt", "ring")
RECOMPUTES = (None, "inline", "early")
STEPS = 2
"""Of schedules without a flush; those with one have a single step."""


@dataclass(frozen=True)
class Mutation:
    """A schedule, and what was done to which entry of it."""

    what: str
    worker: int
    entry: Entry
    schedule: Schedule

    def __str__(self) -> str:
        rows = "\n".join(f"  {worker}: {' '.join(map(str, row))}" for worker, row in enumerate(self.schedule.lists))
        return f"{self.what} {self.entry} of worker {self.worker}:\n{rows}"


@cache
def built(case: Case, form: str, steps: int = STEPS) -> Schedule:
    """A case as flat lists, of actions alone or with syncs and transfers."""
    schedule = case.build(steps=steps) if case.build().flush is False else case.build()
    return flat(lower(schedule) if form == "lowered" else schedule)


def with_rows(schedule: Schedule, **rows: tuple[Entry, ...]) -> Schedule:
    """The same flat schedule with other lists for some workers: `w0=..., w3=...`."""
    return schedule.with_lists(tuple(rows.get(f"w{w}", entries) for w, entries in enumerate(schedule.lists)))


def places(schedule: Schedule) -> Iterator[tuple[int, int, Entry]]:
    for worker, entries in enumerate(schedule.lists):
        for index, entry in enumerate(entries):
            yield worker, index, entry


def drops(schedule: Schedule) -> Iterator[Mutation]:
    """Every schedule with one entry less."""
    for worker, index, entry in places(schedule):
        row = schedule.lists[worker]
        fewer = with_rows(schedule, **{f"w{worker}": row[:index] + row[index + 1 :]})
        yield Mutation("drop", worker, entry, fewer)


def duplicates(schedule: Schedule, where: Callable[[int, int], Iterable[int]]) -> Iterator[Mutation]:
    """Every schedule with one entry twice on its worker; `where(index, length)` says at which places of its list."""
    for worker, index, entry in places(schedule):
        row = schedule.lists[worker]
        for at in where(index, len(row)):
            more = with_rows(schedule, **{f"w{worker}": (*row[:at], entry, *row[at:])})
            yield Mutation(f"duplicate at {at}", worker, entry, more)


def moves(schedule: Schedule, where: Callable[[int, int], Iterable[int]]) -> Iterator[Mutation]:
    """Every schedule with one entry on another worker."""
    for worker, index, entry in places(schedule):
        row = schedule.lists[worker]
        for other in range(schedule.workers):
            for at in where(index, len(schedule.lists[other])) if other != worker else ():
                there = schedule.lists[other]
                rows = {f"w{worker}": row[:index] + row[index + 1 :], f"w{other}": (*there[:at], entry, *there[at:])}
                yield Mutation(f"move to worker {other} at {at}", worker, entry, with_rows(schedule, **rows))


def swaps(schedule: Schedule) -> Iterator[Mutation]:
    """Every schedule with two neighbours of a list exchanged."""
    for worker, index, entry in places(schedule):
        row = schedule.lists[worker]
        if index + 1 < len(row):
            yield Mutation("swap with the next", worker, entry, exchanged(schedule, worker, index, index + 1))


def reversed_sends(schedule: Schedule) -> Iterator[Mutation]:
    """Every schedule with two sends of a worker exchanged, alone and together with their receives."""
    for worker, row in enumerate(schedule.lists):
        sends = [index for index, entry in enumerate(row) if isinstance(entry, Transfer) and entry.sends]
        for first, second in pairwise(sends):
            alone = exchanged(schedule, worker, first, second)
            yield Mutation("reverse with the next send", worker, row[first], alone)
            ends = [_other_end(schedule, worker, row[index]) for index in (first, second)]
            if ends[0][0] == ends[1][0]:
                both = exchanged(alone, ends[0][0], ends[0][1], ends[1][1])
                yield Mutation("reverse with the next send, at both ends", worker, row[first], both)


def exchanged(schedule: Schedule, worker: int, first: int, second: int) -> Schedule:
    row = list(schedule.lists[worker])
    row[first], row[second] = row[second], row[first]
    return with_rows(schedule, **{f"w{worker}": tuple(row)})


def _other_end(schedule: Schedule, worker: int, send: Entry) -> tuple[int, int]:
    assert isinstance(send, Transfer)
    return send.peer, schedule.lists[send.peer].index(Transfer(False, send.value, worker))


def same_place(index: int, length: int) -> Iterable[int]:
    return (min(index, length),)


def ends_and_one(index: int, length: int) -> Iterable[int]:
    """Both ends of a list, and one place that is neither."""
    return sorted({0, length, random.Random(f"{index} {length}").randint(0, length)})


def all_places(index: int, length: int) -> Iterable[int]:
    return range(length + 1)


def subjects(entry: Entry) -> set[tuple[object, ...]]:
    """What an entry is about: stages with their microbatches, units with their rounds; a message is about both its ends."""
    if isinstance(entry, Transfer):
        value = entry.value
        stages = (value.stage, value.stage + 1)
        return {(stage, value.mb) for stage in stages} if value.mb >= 0 else {("unit", value.stage, value.version)}
    return {(a.stage, a.mb) if a.mb >= 0 else ("unit", a.stage, a.version) for a in actions_of(entry)}


def named(result: CheckResult) -> set[tuple[object, ...]]:
    """What the action and the reason of a verdict are about."""
    found: set[tuple[object, ...]] = set()
    for word in re.findall(r"[\[\dN][^\s,:]*", f"{result.action} {result.reason}"):
        for read in (parse, lambda text: Transfer(True, parse_value(text), 0)):
            try:
                found |= subjects(read(word))
            except MeshwrightError:
                continue
    return found


def under_the_arrow(picture: str) -> str:
    lines = picture.split("\n")
    row, column = next((row, line.index("^")) for row, line in enumerate(lines) if line.strip() == "^")
    return lines[row - 1][column:].split(" ")[0]


def refused(mutation: Mutation) -> CheckResult:
    """A broken schedule is refused with law, worker, action, a reason that is about it, and a picture of the place."""
    result = check(mutation.schedule)
    assert not result.ok, mutation
    assert result.law in set(Law), mutation
    assert result.worker in range(mutation.schedule.workers), mutation
    assert result.action and parse(result.action), mutation
    assert result.reason and named(result) & subjects(mutation.entry), f"{result}\n{mutation}"
    if "missing" not in result.reason:
        assert under_the_arrow(result.picture) == result.action, f"{result}\n{mutation}"
    assert str(result).startswith(f"{result.law}: worker {result.worker}, {result.action}: {result.reason}")
    return result


SAMPLED = [Case("chimera", 4, 8, (("mode", "steady"),)), Case("dualpipe", 4, 8), Case("interleaved", 4, 8), Case("zbv", 3, 7)]
SAMPLED += [Case("listed", 4, 6), Case("gems", 4, 5), Case("cyclic", 4, 4), Case("shifted", 4, 6), Case("dualpipev", 3, 8)]


def sample(mutations: Iterator[Mutation], count: int, seed: str) -> list[Mutation]:
    found = list(mutations)
    return random.Random(seed).sample(found, min(count, len(found)))


def agreed(mutation: Mutation) -> bool:
    """Check and oracle give one verdict; where it is yes, the simulation agrees with the oracle too."""
    schedule = mutation.schedule
    verdict = oracle.blocking(schedule) if schedule.lowered else oracle.free(schedule)
    result = check(schedule)
    assert result.ok == verdict.legal, f"oracle: {verdict.why or 'legal'}\ncheck: {result}\n{mutation}"
    if not result.ok:
        assert result.law in set(Law) and result.action and result.reason and named(result), f"{result}\n{mutation}"
        assert under_the_arrow(result.picture) == result.action, f"{result}\n{mutation}"
        return False
    assert result.peak_activations == oracle.peaks(schedule), mutation
    simulation_agrees(schedule if schedule.lowered else flat(lower(schedule)), f"{mutation}")
    return True


def uneven(schedule: Schedule) -> list[StageCost]:
    """Costs without a pattern that an error could hide in."""
    rows = range(schedule.stages)
    return [
        StageCost(1 + 0.1 * s, 0.7 + 0.2 * s, 0.9, 0.55, 0.3, activation_bytes=1, output_bytes=2, gradient_bytes=1) for s in rows
    ]


def simulation_agrees(lowered: Schedule, about: str) -> None:
    """Makespan and live activations of a lowered schedule are those that the oracle finds on its own."""
    verdict = oracle.blocking(lowered)
    assert verdict.legal, f"{verdict.why}\n{about}"
    costs, cluster = uneven(lowered), Cluster(Link(latency_s=0.25, bytes_per_s=8.0))
    timeline = simulate(lowered, costs, cluster)
    assert timeline.makespan_s == pytest.approx(oracle.makespan(lowered, verdict.events, costs, cluster)), about
    assert timeline.makespan_s >= timeline.lower_bound_s - 1e-9, about
    share = lowered.workers / lowered.stages / lowered.parts
    counted = [count * share for count in oracle.peaks(lowered)]
    assert [timeline.peak(worker) for worker in range(lowered.workers)] == pytest.approx(counted), about


def handmade(*rows: str, **more: Any) -> Schedule:
    """A line of workers, one stage each, with these lists."""
    period = tuple(tuple(map(parse, row.split())) for row in rows)
    given = {"name": "handmade", "placement": Placement.line(len(rows)), "microbatches": 1, "period": period}
    return Schedule(**(given | more))


def low(*rows: str, **more: Any) -> Schedule:
    norm = any(word.partition("#")[0] == "N" for row in rows for word in row.split())
    return handmade(*rows, **({"lowered": True, "norm": norm} | more))


def plus(schedule: Schedule, *texts: str) -> Schedule:
    """A schedule with more entries at the ends of its lists."""
    rows = zip(schedule.period, texts, strict=True)
    return replace(schedule, period=tuple((*row, *map(parse, text.split())) for row, text in rows))


ONEF1B, CHIMERA = schedules.build("onef1b", workers=2, microbatches=2), schedules.build("chimera", workers=2, microbatches=2)
