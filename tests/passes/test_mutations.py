"""A schedule with one thing wrong in it is refused, a schedule with two things exchanged is judged as the oracle judges it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import Action, Cell, Op, Schedule, Transfer, check, lower, schedule_from_json, schedule_to_json, schedules
from meshwright.ir.action import Entry
from meshwright.passes.laws import Law
from tests.support import oracle
from tests.support.cases import Case, cases, flat, large
from tests.support.mutations import (
    CHIMERA,
    FORMS,
    FUZZ,
    ONEF1B,
    SAMPLED,
    SOAK,
    SYNCS,
    TINY,
    TINY_COMPARED,
    Mutation,
    agreed,
    all_places,
    built,
    drops,
    duplicates,
    ends_and_one,
    low,
    moves,
    named,
    places,
    plus,
    refused,
    reversed_sends,
    same_place,
    sample,
    swaps,
    with_rows,
)
from tests.support.oracle_rules import actions_of


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


PLACED = [plus(ONEF1B, "N", "N"), plus(ONEF1B, "0S N", "1S N"), plus(ONEF1B, "N 0U", "N 1U")]
PLACED += [plus(CHIMERA, "N", "N"), plus(CHIMERA, "0S 1S N 0U 1U", "0S 1S N 1U 0U")]


@pytest.mark.parametrize("schedule", PLACED, ids=lambda schedule: f"{schedule.name}-{len(schedule.period[0])}")
def test_a_placed_reduction_that_all_have_lost_is_refused(schedule: Schedule) -> None:
    refused_without_reduction(lower(schedule))


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


def test_cells_are_in_the_schedules_that_are_mutated() -> None:
    """So that dropping, doubling and moving reaches every kind of entry."""
    there = {type(entry) for case in SAMPLED for _, _, entry in places(built(case, "lowered", 3))}
    assert there == {Action, Cell, Transfer}
    ops = {a.op for case in SAMPLED for _, _, e in places(built(case, "lowered", 3)) for a in actions_of(e)}
    assert ops == set(Op) - {Op.G}
