"""Check never raises, says the same of a schedule and of its lowered form, and names what a stuck action waits for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from meshwright import Action, MeshwrightError, Placement, Schedule, check, lower, schedule_from_json, schedules, simulate
from meshwright.ir.action import Entry, parse, parse_value
from meshwright.passes.laws import Law
from tests.support.cases import Case, schedule_files
from tests.support.mutations import (
    CHIMERA,
    FUZZ,
    ONEF1B,
    SOAK,
    TINY_COMPARED,
    Mutation,
    agreed,
    built,
    handmade,
    plus,
    swaps,
    uneven,
    with_rows,
)
from tests.support.oracle_rules import Needs, fact_of


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


PIPEDREAM = schedules.build("pipedream", workers=2, microbatches=2, steps=4)
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
    needs = Needs(schedule)
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
                assert fact_of(value) in takes, str(result)


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
