"""A schedule with one thing wrong in it is refused, a schedule with two things exchanged is judged as the oracle judges it.

The oracle (`oracle.py`) shares no code with the checker. Where an exchange leaves a schedule legal, its simulation must
agree with the oracle's own clock and count.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import (
    Action,
    Cell,
    CheckResult,
    Cluster,
    Link,
    MeshwrightError,
    Op,
    Placement,
    Recompute,
    Schedule,
    StageCost,
    Transfer,
    check,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
    to_csv,
)
from meshwright.ir.action import Entry, parse, parse_value
from meshwright.ir.schedule import ChannelOrder
from meshwright.passes.laws import Law
from tests import oracle
from tests.cases import Case, cases, flat, large, schedule_files, tiny

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


# What is wrong is refused


def subjects(entry: Entry) -> set[tuple[object, ...]]:
    """What an entry is about: stages with their microbatches, units with their rounds; a message is about both its ends."""
    if isinstance(entry, Transfer):
        value = entry.value
        stages = (value.stage, value.stage + 1)
        return {(stage, value.mb) for stage in stages} if value.mb >= 0 else {("unit", value.stage, value.version)}
    return {(a.stage, a.mb) if a.mb >= 0 else ("unit", a.stage, a.version) for a in oracle.actions_of(entry)}


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_a_dropped_entry_is_refused(case: Case, form: str) -> None:
    for mutation in drops(built(case, form)):
        refused(mutation)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_an_entry_that_comes_twice_at_its_place_is_refused(case: Case, form: str) -> None:
    for mutation in duplicates(built(case, form), same_place):
        refused(mutation)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TINY_COMPARED, ids=str)
def test_an_entry_that_comes_again_elsewhere_is_refused(case: Case, form: str) -> None:
    for mutation in duplicates(built(case, form), ends_and_one):
        refused(mutation)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TINY_COMPARED, ids=str)
def test_an_entry_on_another_worker_is_refused(case: Case, form: str) -> None:
    for mutation in moves(built(case, form), same_place):
        refused(mutation)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_an_entry_twice_or_elsewhere_is_refused_at_every_place(case: Case, form: str) -> None:
    schedule = built(case, form)
    where = all_places if sum(map(len, schedule.lists)) <= 60 else ends_and_one
    for mutate in (duplicates, moves):
        for mutation in mutate(schedule, where):
            refused(mutation)


def without_reduction(schedule: Schedule) -> Schedule:
    """A schedule that has lost its N on every worker at once, so that nobody waits for it."""
    rows = schedule.lists
    return schedule.with_lists(tuple(tuple(e for e in row if not (isinstance(e, Action) and e.op is Op.N)) for row in rows))


def refused_without_reduction(lowered: Schedule) -> None:
    again = schedule_from_json(schedule_to_json(lowered))
    assert check(lowered).ok and again == lowered
    for schedule in (without_reduction(lowered), without_reduction(again)):
        result = check(schedule)
        assert (result.law, result.worker, result.action) == (Law.ONCE, 0, "N"), str(result)
        assert result.reason == "N is missing on worker 0"
        assert not oracle.blocking(schedule).legal


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_a_reduction_that_all_have_lost_is_refused(case: Case, sync: str) -> None:
    lowered = flat(lower(case.build(), sync=sync))
    reduces = any(isinstance(entry, Action) and entry.op is Op.N for _, _, entry in places(lowered))
    assert reduces == lowered.flush
    if reduces:
        refused_without_reduction(lowered)


@pytest.mark.parametrize("ends", ["N", "0S N", "0S N 0U", "N 0U"])
def test_a_placed_reduction_that_all_have_lost_is_refused(ends: str) -> None:
    for case in (Case("onef1b", 1, 2), Case("gpipe", 1, 1)):
        schedule = case.build()
        refused_without_reduction(lower(replace(schedule, period=((*schedule.period[0], *map(parse, ends.split())),))))


SAMPLED = [Case("chimera", 4, 8, (("mode", "steady"),)), Case("dualpipe", 4, 8), Case("interleaved", 4, 8), Case("zbv", 3, 7)]
SAMPLED += [Case("listed", 4, 6), Case("gems", 4, 5), Case("cyclic", 4, 4), Case("shifted", 4, 6), Case("dualpipev", 3, 8)]


def sample(mutations: Iterator[Mutation], count: int, seed: str) -> list[Mutation]:
    found = list(mutations)
    return random.Random(seed).sample(found, min(count, len(found)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_larger_schedules_with_something_wrong_are_refused(case: Case, form: str) -> None:
    schedule = built(case, form, 3)
    for mutate in (
        drops,
        lambda s: duplicates(s, same_place),
        lambda s: duplicates(s, ends_and_one),
        lambda s: moves(s, same_place),
    ):
        for mutation in sample(mutate(schedule), 6, f"{case}{form}"):
            refused(mutation)


@pytest.mark.slow
@pytest.mark.parametrize("name", schedules.names())
def test_all_large_schedules_with_something_wrong_are_refused(name: str) -> None:
    for case in (case for case in large() if case.name == name and case.workers > 1):
        for form in FORMS:
            schedule = built(case, form, 3)
            for mutate in (drops, lambda s: duplicates(s, same_place), lambda s: moves(s, same_place)):
                for mutation in sample(mutate(schedule), 2, str(case)):
                    refused(mutation)


@pytest.mark.parametrize("name", [name for name in schedules.names() if not Case(name, 2, 2).build().flush])
@pytest.mark.parametrize("segment", ["prologue", "period", "drain"])
def test_what_is_wrong_in_a_segment_is_refused(name: str, segment: str) -> None:
    """Where a period repeats, an error in it is an error, though it may make up for itself a round later."""
    whole = Case(name, 2, 2).build(steps=5)
    for schedule in (whole, lower(whole).repeated(2)):
        assert check(schedule).ok and schedule.repeats > 1
        lists: tuple[tuple[Entry, ...], ...] = getattr(schedule, segment)
        for worker, row in enumerate(lists):
            for index, entry in enumerate(row):
                for other in (row[:index] + row[index + 1 :], (*row[:index], entry, *row[index:])):
                    changed = replace(schedule, **{segment: (*lists[:worker], other, *lists[worker + 1 :])})
                    result = check(changed)
                    assert not result.ok, f"{entry} of worker {worker}\n{other}"
                    assert named(result), str(result)


# What is exchanged is judged right


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TINY_COMPARED, ids=str)
def test_swapped_neighbours_are_judged_as_the_oracle_does(case: Case, form: str) -> None:
    for mutation in swaps(built(case, form)):
        agreed(mutation)


@pytest.mark.parametrize("case", TINY_COMPARED, ids=str)
def test_reversed_sends_are_judged_as_the_oracle_does(case: Case) -> None:
    for mutation in reversed_sends(built(case, "lowered")):
        agreed(mutation)


def test_both_verdicts_come_up() -> None:
    """Neither law above holds for want of examples."""
    schedule = built(Case("chimera", 2, 2), "lowered")
    assert {agreed(mutation) for mutation in swaps(schedule)} == {True, False}
    late = low(
        "0F0 0F1 0act0>1 0act1>1 0grad0<1 0B0 0grad1<1 0B1 0S N 0U", "0act0<0 0act1<0 1F0 1F1 1B0 0grad0>0 1B1 0grad1>0 1S N 1U"
    )
    assert {agreed(mutation) for mutation in reversed_sends(replace(late, microbatches=2))} == {True, False}
    assert {agreed(mutation) for mutation in swaps(built(Case("gpipe", 2, 3), "plain"))} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", schedules.names())
def test_swaps_of_many_sizes_are_judged_as_the_oracle_does(name: str, form: str) -> None:
    for case in cases((1, 2, 3, 4), (1, 2, 3, 4, 8), names=[name]):
        schedule = built(case, form, 3)
        for mutation in sample(swaps(schedule), 12, str(case)) + sample(reversed_sends(schedule), 8, str(case)):
            agreed(mutation)


@st.composite
def shuffled(draw: st.DrawFn, picks: list[Case]) -> Mutation:
    """A schedule with a few entries of its lists moved a little, sometimes both ends of a message together."""
    case, form = draw(st.sampled_from(picks)), draw(st.sampled_from(FORMS))
    schedule = built(case, form)
    worker = 0
    for _ in range(draw(st.integers(1, 4))):
        worker = draw(st.integers(0, schedule.workers - 1))
        row = list(schedule.lists[worker])
        source = draw(st.integers(0, len(row) - 1))
        entry = row.pop(source)
        target = min(len(row), max(0, source + draw(st.integers(-5, 5))))
        row.insert(target, entry)
        schedule = with_rows(schedule, **{f"w{worker}": tuple(row)})
    return Mutation("shuffle", worker, schedule.lists[worker][0], schedule)


@FUZZ
@given(shuffled(TINY))
def test_shuffled_lists_are_judged_as_the_oracle_does(mutation: Mutation) -> None:
    agreed(mutation)


@pytest.mark.slow
@SOAK
@given(shuffled(TINY + SAMPLED))
def test_shuffled_lists_are_judged_as_the_oracle_does_for_long(mutation: Mutation) -> None:
    agreed(mutation)


# What lowering makes is legal


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_is_legal_for_the_oracle(name: str) -> None:
    for case in cases(names=[name], every_option=False):
        assert agreed(Mutation("nothing", 0, Action(Op.F, 0, 0), built(case, "plain", 4))), case
        simulation_agrees(built(case, "lowered", 4), str(case))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("case", TINY_COMPARED, ids=str)
def test_every_way_to_lower_is_legal(case: Case, sync: str) -> None:
    schedule = case.build()
    for recompute in RECOMPUTES if schedule.recompute is None else (None,):
        lowered = flat(lower(schedule, sync=sync, recompute=recompute))
        assert agreed(Mutation(f"lower with {sync}, recompute {recompute}", 0, lowered.lists[0][0], lowered))


@pytest.mark.slow
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", schedules.names())
def test_every_way_to_lower_is_legal_at_many_sizes(name: str, sync: str) -> None:
    for case in cases(names=[name]):
        for recompute in RECOMPUTES if case.build().recompute is None else (None,):
            lowered = flat(lower(case.build(), sync=sync, recompute=recompute))
            assert agreed(Mutation(f"{case}: lower with {sync}, {recompute}", 0, lowered.lists[0][0], lowered))


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("name", schedules.names())
def test_any_number_of_steps_lowers(name: str, steps: int) -> None:
    for case in cases((1, 2, 3), (2, 3), names=[name], every_option=False):
        schedule = case.build(steps=steps)
        lowered = lower(schedule)
        assert check(schedule).ok and check(lowered).ok, case
        assert oracle.blocking(flat(lowered)).legal, case
        assert oracle.peaks(lowered) == oracle.peaks(schedule), case


WIDE = Placement(((((0, 1, 2),), ((3, 4),), ((5,),)),))
LINE = schedules.build("onef1b", workers=3, microbatches=3)


@pytest.mark.parametrize("rows", [0, 1, 5, 6])
@pytest.mark.parametrize("sync", ["lazy", "eager"])
def test_teams_and_ties_are_legal_for_the_oracle(rows: int, sync: str) -> None:
    period = tuple(LINE.period[stage] for stage in (0, 0, 0, 1, 1, 2))
    schedule = replace(LINE, placement=replace(WIDE, rows=rows), period=period, ties=((0, 2), (1, 2)))
    lowered = flat(lower(schedule, sync=sync))
    assert check(schedule).ok and check(lowered).ok
    assert oracle.blocking(lowered).legal and oracle.free(schedule).legal
    for mutation in sample(drops(lowered), 30, "drop"):
        refused(mutation)
    for mutation in sample(swaps(lowered), 30, "swap"):
        assert check(mutation.schedule).ok == oracle.blocking(mutation.schedule).legal, mutation


# Check never raises, and says the same of a schedule and of its lowered form


def verdicts_of_both_forms(schedule: Schedule) -> None:
    result = check(schedule)
    assert result.ok or (result.law in set(Law) and result.reason)
    try:
        lowered = lower(schedule)
    except MeshwrightError:
        assert not result.ok
        return
    if result.ok:
        assert check(lowered).ok, f"plain: {result}\nlowered: {check(lowered)}"


def never_raises(data: dict[str, Any]) -> None:
    try:
        schedule = schedule_from_json(json.dumps(data))
    except MeshwrightError:
        return
    result = check(schedule)
    assert result.ok == (result.law is None)
    assert result.ok or result.reason
    assert str(result)


def runs_or_is_refused(data: dict[str, Any]) -> None:
    """Whoever lowers or simulates without asking `check` first gets a MeshwrightError at worst."""
    try:
        schedule = schedule_from_json(json.dumps(data))
        lower(schedule)
        simulate(schedule, uneven(schedule))
    except MeshwrightError as error:
        assert str(error)


BARE: dict[str, Any] = {"schema": 1, "kind": "schedule", "name": "x", "microbatches": 1, "placement": [[[[0]]]]}
PAIR: dict[str, Any] = BARE | {"placement": [[[[0]], [[1]]]], "period": ["0F0 0B0", "1F0 1B0"]}


ODD = {
    "an empty list": BARE | {"period": [""]},
    "no lists": BARE | {"period": []},
    "no period": BARE | {"period": ["0F0 0B0"], "repeats": 0},
    "a wrong period that does not run": BARE | {"period": ["1F0 0G"], "repeats": 0},
    "a prologue without a period": BARE | {"period": [], "prologue": ["0F0 0B0"]},
    "recompute of no stage": BARE | {"period": ["0F0 0B0"], "recompute": []},
    "recompute of one stage of two": PAIR | {"recompute": [[1.0, False]]},
    "a channel for what is not there": PAIR | {"channels": [[[0, 1], "0F5"]]},
    "a channel for a stage that is not there": PAIR | {"channels": [[[0, 1], "7F0"]]},
    "a channel behind the last stage": PAIR | {"channels": [[[0, 1], "1F0"]]},
    "a channel before the first stage": PAIR | {"channels": [[[0, 1], "0B0"]]},
    "a channel for a replica that is not there": PAIR | {"channels": [[[0, 1], "0F0@3"]]},
    "a channel between others": PAIR | {"channels": [[[5, 9], "0F0"]]},
    "a channel that carries twice": PAIR | {"channels": [[[0, 1], "0F0 0F0"]]},
    "a channel for an update": PAIR | {"channels": [[[0, 0], "0U"]]},
    "two turns for one action": PAIR | {"turns": [["0F0", "0F0"], ["1F0", "0F0"]]},
    "workers without a stage": PAIR | {"placement": [[[[0]], [[7]]]], "period": [""] * 8},
    "syncs in cells": PAIR | {"period": ["0F0 0B0 [0S|2S]", "1F0 1B0 [2S|1S]"], "ties": [[0, 1]]},
    "gather in a cell": PAIR | {"period": ["0F0 [0B0|0G]", "1F0 1B0"]},
    "a stage that is not there": PAIR | {"period": ["0F0 0B0", "7F0 7B0"]},
    "a replica that is not there": PAIR | {"period": ["0F0@3 0B0@3", "1F0 1B0"]},
    "a unit that is not there": PAIR | {"period": ["0F0 0B0 9U", "1F0 1B0"]},
    "a tie of no stages": PAIR | {"ties": [[]]},
    "a tie of a stage that is not there": PAIR | {"ties": [[0, 9]]},
    "a message to nobody": PAIR | {"period": ["0F0 0act0>9 0B0", "1F0 1B0"], "lowered": True},
    "transfers in what is not lowered": PAIR | {"period": ["0F0 0act0>1 0B0", "0act0<0 1F0 1B0"]},
}


@pytest.mark.parametrize("what", ODD)
def test_check_has_a_verdict_on_odd_files(what: str) -> None:
    never_raises(ODD[what])


@pytest.mark.parametrize("what", ODD)
def test_odd_files_run_or_are_refused(what: str) -> None:
    runs_or_is_refused(ODD[what])


@FUZZ
@given(schedule_files())
def test_check_never_raises(data: dict[str, Any]) -> None:
    never_raises(data)


@FUZZ
@given(schedule_files())
def test_any_schedule_runs_or_is_refused(data: dict[str, Any]) -> None:
    runs_or_is_refused(data)


@FUZZ
@given(schedule_files())
def test_any_schedule_and_its_lowered_form_have_one_verdict(data: dict[str, Any]) -> None:
    try:
        schedule = schedule_from_json(json.dumps(data))
    except MeshwrightError:
        return
    if check(schedule).ok:
        verdicts_of_both_forms(schedule)


@pytest.mark.slow
@SOAK
@given(schedule_files())
def test_check_never_raises_for_long(data: dict[str, Any]) -> None:
    never_raises(data)
    runs_or_is_refused(data)


def plus(schedule: Schedule, *texts: str) -> Schedule:
    """A schedule with more entries at the ends of its lists."""
    rows = zip(schedule.period, texts, strict=True)
    return replace(schedule, period=tuple((*row, *map(parse, text.split())) for row, text in rows))


ONEF1B, CHIMERA = schedules.build("onef1b", workers=2, microbatches=2), schedules.build("chimera", workers=2, microbatches=2)
PIPEDREAM = schedules.build("pipedream", workers=2, microbatches=2)
BOTH_FORMS = {
    "as it is": ONEF1B,
    "syncs placed": plus(ONEF1B, "0S", "1S"),
    "syncs of replicas placed": plus(CHIMERA, "0S 1S", "0S 1S"),
    "updates placed": plus(ONEF1B, "0U", "1U"),
    "syncs and updates placed": plus(ONEF1B, "0S 0U", "1S 1U"),
    "reduction placed": plus(ONEF1B, "N", "N"),
    "all placed": plus(CHIMERA, "0S 1S N 0U 1U", "0S 1S N 1U 0U"),
    "two rounds in one period": replace(schedules.build("onef1b", workers=2, microbatches=4), microbatches=2),
    "syncs in cells": plus(CHIMERA, "[0S|1S]", "[1S|0S]"),
    "updates in cells": plus(CHIMERA, "0S 1S N [0U|1U]", "0S 1S N [1U|0U]"),
    "no period": ONEF1B.repeated(0),
    "three periods": ONEF1B.repeated(3),
    "without a flush, as one list": replace(PIPEDREAM, period=PIPEDREAM.lists, prologue=(), drain=(), repeats=1),
}


@pytest.mark.parametrize("what", BOTH_FORMS)
def test_a_schedule_and_its_lowered_form_have_one_verdict(what: str) -> None:
    verdicts_of_both_forms(BOTH_FORMS[what])


def test_updates_that_replicas_have_placed_get_their_syncs() -> None:
    """Lowering adds what is missing: here the syncs, of units that two workers hold."""
    for schedule in (plus(CHIMERA, "0U 1U", "0U 1U"), plus(CHIMERA, "N 0U 1U", "N 0U 1U"), plus(CHIMERA, "N", "N")):
        result = check(schedule)
        assert result.ok, str(result)


def test_updates_that_teams_have_placed_without_a_flush_get_their_syncs() -> None:
    """Two workers share a stage, take turns at its microbatches and update it after each round."""
    teams = Placement(((((0,), (1,)),),))
    for rows in (("0F0 0B0 0U", "0F1 0B1 0U"), ("0F0 0B0 0F2 0B2 0U 0U#1", "0F1 0B1 0F3 0B3 0U 0U#1")):
        schedule = handmade(*rows, placement=teams, microbatches=2, flush=False)
        result = check(schedule.with_lists(schedule.lists))
        assert result.ok, str(result)


def test_collectives_in_cells_do_not_escape_their_order() -> None:
    crossed = plus(CHIMERA, "[0S|1S]", "[1S|0S]")
    assert not check(crossed).ok


@pytest.mark.parametrize("case", TINY_COMPARED, ids=str)
def test_what_a_stuck_action_waits_for_is_something_it_needs(case: Case) -> None:
    schedule = built(case, "plain")
    needs = oracle.Needs(schedule)
    for mutation in swaps(schedule):
        result = check(mutation.schedule)
        said = re.search(r"stops at (\S+), which waits for (\d\S*)", result.reason or "")
        if said and not said[1].startswith("[") and parse(said[1]) in mutation.schedule.lists[result.worker or 0]:
            action = parse(said[1])
            assert isinstance(action, Action)
            value = parse_value(said[2])
            takes, looks, _ = needs.of(result.worker or 0, action)
            kinds = {str(fact[0]).replace("gradient", "wgrad") for fact in takes + looks}
            assert value.kind.value in kinds, str(result)
            if value.kind.value in ("act", "grad"):
                assert oracle.fact_of(value) in takes, str(result)


def test_a_stuck_sync_that_lowering_has_added_is_in_the_picture() -> None:
    """Worker 0 updates before its last gradient: what waits is a sync, which the lists do not have yet."""
    schedule = built(Case("cyclic", 2, 2, (("margin", 1),)), "plain")
    first = schedule.lists[0]
    late = next(index for index, entry in enumerate(first) if str(entry) == "0B2")
    assert not agreed(Mutation("move to the end", 0, first[late], with_rows(schedule, w0=_to_the_end(first, late))))


def _to_the_end(row: tuple[Entry, ...], index: int) -> tuple[Entry, ...]:
    return (*row[:index], *row[index + 1 :], row[index])


def test_a_crossed_pair_of_syncs_is_not_said_to_wait_for_an_activation() -> None:
    result = check(plus(CHIMERA, "0S 1S", "1S 0S"))
    assert not result.ok and result.action in ("0S", "1S")
    assert "act" not in (result.reason or ""), str(result)


# Every law by name


def handmade(*rows: str, **more: Any) -> Schedule:
    """A line of workers, one stage each, with these lists."""
    period = tuple(tuple(map(parse, row.split())) for row in rows)
    given = {"name": "handmade", "placement": Placement.line(len(rows)), "microbatches": 1, "period": period}
    return Schedule(**(given | more))


def low(*rows: str, **more: Any) -> Schedule:
    return handmade(*rows, **({"lowered": True} | more))


END = "0S N 0U"
TURNS = tuple((parse(writer), parse("1B0")) for writer in ("1F0", "0F0"))
LAWS: list[tuple[Law, Schedule, int, str | None, list[str]]] = [
    (Law.PLACEMENT, handmade("0F0 0B0 1F0", "1B0"), 0, "1F0", ["1F0 belongs on worker 1"]),
    (Law.PLACEMENT, handmade("0F0 0B0", "1F0 1B0 2F0"), 1, "2F0", ["2 stages", "1 replicas", "1 parts"]),
    (Law.PLACEMENT, handmade("0F0@1 0B0@1"), 0, "0F0@1", ["1 replicas"]),
    (Law.PLACEMENT, handmade("0F0.1 0B0.1"), 0, "0F0.1", ["1 parts"]),
    (Law.PLACEMENT, handmade("0F0 0B0 1U", "1F0 1B0"), 0, "1U", ["worker 0", "unit 1"]),
    (Law.PLACEMENT, handmade("0F0 0B0 4U", "1F0 1B0"), 0, "4U", ["unit 4"]),
    (Law.PLACEMENT, low("0F0 0act0>7 0B0", "1F0 1B0"), 0, "0act0>7", ["worker 7"]),
    (Law.PLACEMENT, low("0F0 0act0>0 0B0", "1F0 1B0"), 0, "0act0>0", ["worker 0"]),
    (Law.PLACEMENT, handmade("0F0 0B0 0G"), 0, "0G", ["gather"]),
    (Law.PLACEMENT, handmade("0F0 0B0", placement=Placement.line(2)), 0, None, ["2 workers", "1 lists"]),
    (Law.ONCE, handmade("0F0 0F0 0B0"), 0, "0F0", ["0F0 comes twice"]),
    (Law.ONCE, handmade("0F0 0B0 0B0"), 0, "0B0", ["0B0 comes twice"]),
    (Law.ONCE, handmade("0F0 0B0", "1F0"), 1, "1F0", ["stage 1", "microbatch 0", "backward is missing"]),
    (Law.ONCE, handmade("0F0 0I0"), 0, "0I0", ["stage 0", "microbatch 0", "W is missing"]),
    (Law.ONCE, handmade("0F0 0B0", ""), 1, "1F0", ["1F0 is missing on worker 1"]),
    (Law.ONCE, handmade("0F1 0B1", microbatches=2), 0, None, ["microbatch 0"]),
    (Law.ONCE, low("0F0 0B0 0S N"), 0, "0U", ["0U is missing on worker 0"]),
    (Law.ONCE, low("0F0 0B0 N 0U"), 0, "0S", ["0S is missing on worker 0"]),
    (Law.ONCE, low("0F0 0B0 0S 0U", norm=True), 0, "N", ["N is missing on worker 0"]),
    (Law.ONCE, low("0F0 0B0 0S 0S N 0U"), 0, "0S", ["0S comes twice"]),
    (Law.ONCE, low("0F0 0B0 0S N 0U 0U#3"), 0, "0U#3", ["1 rounds"]),
    (Law.ONCE, handmade("0F0 0B0", "0F0@1 0B0@1", placement=Placement.mirrored(2)), 0, None, ["microbatch 0", "replica"]),
    (Law.ORDER, handmade("0B0 0F0"), 0, "0B0", ["forward must come before"]),
    (Law.ORDER, handmade("0F0 0W0 0I0"), 0, "0W0", ["I must come before"]),
    (Law.ORDER, handmade("0F0 0B0 0I0"), 0, "0I0", ["backward has been done"]),
    (Law.ORDER, handmade("0F0 0R0 0B0"), 0, "0R0", ["stage 0 does not recompute"]),
    (Law.ORDER, handmade("0F0 0B0", recompute=(Recompute(1.0, early=True),)), 0, "0B0", ["recompute must come before"]),
    (Law.VERSION, handmade("0F0 0B0#1"), 0, "0B0#1", ["reads version 1", "forward read 0"]),
    (Law.VERSION, low("0F0#1 0B0#1 " + END), 0, "0F0#1", ["0param#1", "version 1 of unit 0"]),
    (Law.VERSION, low("0F0 0F1#1 0B0 0B1#1 0S 0U 0S#1 0U#1", flush=False), 0, "0F1#1", ["version 1 of unit 0"]),
    (Law.UNIT, replace(ONEF1B, ties=((0, 0),)), 0, None, ["(0, 0)", "2"]),
    (Law.UNIT, replace(ONEF1B, ties=((0, 5),)), 0, None, ["(0, 5)", "2"]),
    (Law.UNIT, replace(ONEF1B, ties=((1,),)), 0, None, ["(1,)", "2"]),
    (Law.READ, low("0F0 0B0 0S N 0U", "1F0 1B0 1S N 1U"), 0, "0B0", ["0grad0", "worker 0 does not have it"]),
    (Law.READ, low("0F0 0S 0B0 N 0U"), 0, "0S", ["0wgrad0", "worker 0 does not have it"]),
    (Law.READ, low("0F0 0B0 0U 0S N"), 0, "0U", ["0sum~0", "worker 0 does not have it"]),
    (
        Law.READ,
        low("0F0 0act0>1 0act0>1 0grad0<1 0B0 " + END, "0act0<0 0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        0,
        "0act0>1",
        ["sends 0act0", "used up"],
    ),
    (
        Law.READ,
        low("3act0>1 0F0 0act0>1 0grad0<1 0B0 " + END, "3act0<0 0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        0,
        "3act0>1",
        ["sends 3act0"],
    ),
    (
        Law.COPY,
        low("0param~0>1 0param~0>1 0F0 0act0>1 0grad0<1 0B0 " + END, "0param~0<0 0param~0<0 0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        1,
        "0param~0<0",
        ["makes 0param~0", "worker 1 still holds it"],
    ),
    (
        Law.LEFTOVER,
        low("0F0 0act0>1 0grad0<1 0B0 " + END, "0act0<0 1F0 1B0 0grad0>0 1S N 1U", turns=TURNS),
        0,
        "0F0",
        ["makes 1turn0~1", "nobody uses"],
    ),
    (
        Law.DEADLOCK,
        low("0grad0<1 0F0 0act0>1 0B0 " + END, "0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        0,
        "0grad0<1",
        ["worker 0 at 0grad0<1", "worker 1 at 0act0<0"],
    ),
    (Law.DEADLOCK, low("0F0 0B0 0act0>1 " + END, "1F0 1B0 1S 1U N"), 0, "0act0>1", ["worker 0 at 0act0>1", "worker 1 at N"]),
    (Law.DEADLOCK, handmade("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", microbatches=2), 1, "1F1", ["worker 1", "0act1"]),
    (
        Law.CHANNEL,
        low(
            "0F0 0F1 0act0>1 0act1>1 0grad0<1 0B0 0grad1<1 0B1 " + END,
            "0act1<0 0act0<0 1F0 1F1 1B0 0grad0>0 1B1 0grad1>0 1S N 1U",
            microbatches=2,
        ),
        0,
        "0act0>1",
        ["sends 0act0", "worker 1 receives 0act1"],
    ),
    (
        Law.COLLECTIVE,
        low(
            "0F0 0act0>1 0act1@1<1 1F1@1 1B1@1 0grad1@1>1 0grad0<1 0B0 0S 1S N 0U 1U",
            "0F1@1 0act0<0 0act1@1>0 1F0 1B0 0grad1@1<0 0grad0>0 0B1@1 1S 0S N 0U 1U",
            placement=Placement.mirrored(2),
            microbatches=2,
        ),
        0,
        "0S",
        ["worker 0 at 0S", "worker 1 at 1S"],
    ),
    (Law.ONCE, low("0F0 0B0 0S N 0U", "1F0 1B0 1S 1U", flush=False), 1, "N", ["N is missing on worker 1"]),
    (
        Law.BORDER,
        handmade("0B0 0U", prologue=((parse("0F0"),),), drain=((),), flush=False),
        0,
        "0U",
        ["saved1", "worker 0"],
    ),
]


@pytest.mark.parametrize(
    ("law", "schedule", "worker", "action", "said"), LAWS, ids=[f"{n}-{row[0]}" for n, row in enumerate(LAWS)]
)
def test_every_law_names_the_place_and_the_numbers(
    law: Law, schedule: Schedule, worker: int, action: str | None, said: list[str]
) -> None:
    result = check(schedule)
    assert not result.ok
    assert result.law == law.value, str(result)
    if action is not None:
        assert (result.worker, result.action) == (worker, action), str(result)
    assert all(text in (result.reason or "") for text in said), str(result)


def test_every_law_is_in_the_table() -> None:
    assert {law for law, *_ in LAWS} == set(Law)


def test_the_handmade_schedules_are_one_step_from_legal() -> None:
    """The table above breaks what is whole here."""
    pair = low("0F0 0act0>1 0grad0<1 0B0 " + END, "0act0<0 1F0 1B0 0grad0>0 1S N 1U")
    for schedule in (handmade("0F0 0B0"), handmade("0F0 0I0 0W0"), low("0F0 0B0 " + END), pair, CHIMERA, ONEF1B):
        assert check(schedule).ok
        assert (oracle.blocking if schedule.lowered else oracle.free)(schedule).legal


def test_a_channel_that_carries_in_an_impossible_order_is_refused() -> None:
    producers = tuple(parse(text) for text in ("0F1", "0F0", "1B0", "1B1"))
    order = tuple(action for action in producers if isinstance(action, Action))
    assert not check(replace(ONEF1B, channels=(ChannelOrder((0, 1), (*order[2:], *order[:2])),))).ok
    assert oracle.free(replace(ONEF1B, channels=(ChannelOrder((0, 1), (*order[2:], *order[:2])),))).legal is False


# torch's own validator sees less


def torch_accepts(schedule: Schedule) -> bool:
    """What torch.distributed.pipelining says of the compute form."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = [[module._Action.from_str(cell) for cell in line.split(",")] for line in to_csv(schedule).splitlines()]
    try:
        module._validate_schedule(dict(enumerate(rows)), schedule.workers, schedule.stages, schedule.microbatches)
    except AssertionError:
        return False
    return True


IN_CSV = [case for case in TINY if case.name in ("onef1b", "gpipe", "interleaved", "zbv", "hanayo", "zero_bubble", "dualpipev")]


@pytest.mark.parametrize("case", IN_CSV, ids=str)
def test_what_torch_refuses_is_refused_here(case: Case) -> None:
    schedule = replace(built(case, "plain"), channels=())
    assert torch_accepts(schedule) and check(schedule).ok
    mutations = [*drops(schedule), *duplicates(schedule, same_place), *moves(schedule, same_place), *swaps(schedule)]
    accepted_by_torch_alone = 0
    for mutation in mutations:
        ours = check(mutation.schedule).ok
        theirs = torch_accepts(mutation.schedule)
        assert theirs or not ours, mutation
        accepted_by_torch_alone += theirs and not ours
    assert accepted_by_torch_alone, "torch counts with sets: what comes twice is not seen"


def test_torch_accepts_what_comes_twice_and_what_gets_stuck() -> None:
    twice = handmade("0F0 0F0 0B0", "1F0 1B0")
    assert torch_accepts(twice)
    assert check(twice).law == Law.ONCE
    both_ways = handmade("0F0 0B0 0I0 0W0", "1F0 1B0", microbatches=1)
    assert not check(both_ways).ok
    stuck = handmade("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", microbatches=2)
    assert torch_accepts(stuck)
    result = check(stuck)
    assert result.law == Law.DEADLOCK and (result.worker, result.action) == (1, "1F1")


def test_cells_are_in_the_schedules_that_are_mutated() -> None:
    """So that dropping, doubling and moving reaches every kind of entry."""
    there = {type(entry) for case in SAMPLED for _, _, entry in places(built(case, "lowered", 3))}
    assert there == {Action, Cell, Transfer}
    ops = {a.op for case in SAMPLED for _, _, e in places(built(case, "lowered", 3)) for a in oracle.actions_of(e)}
    assert ops == set(Op) - {Op.G}
