"""A schedule file reads back what was written; what else stands in it is refused by its key."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from meshwright import (
    Action,
    MeshwrightError,
    Op,
    Placement,
    Recompute,
    Schedule,
    check,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
)
from meshwright.ir.schedule import ChannelOrder
from tests.support.cases import cases, large, schedule_files
from tests.support.file_forms import FUZZ, INFINITY, LONG, NAN, SOAK, plain, short


def with_extras() -> dict[str, Schedule]:
    """Schedules that use what no schedule by name uses."""
    line = plain(workers=3, microbatches=4)
    forwards = tuple(action for action in line.period[0] if isinstance(action, Action))
    teams = Placement((((((0, 1, 2),), ((3, 4),), ((5,),))),), rows=5)
    wide = replace(line, placement=teams, period=tuple(line.period[stage] for stage in (0, 0, 0, 1, 1, 2)))
    tied = replace(line, ties=((0, 2), (0, 1, 2)))
    turned = replace(line, turns=((Action(Op.F, 1, 0), Action(Op.F, 0, 2)),))
    return {
        "ties": tied,
        "recompute": replace(line, recompute=(Recompute(1.0), Recompute(0.5), Recompute(0.0))),
        "early recompute": lower(line, recompute="early"),
        "inline recompute": lower(line, recompute="inline"),
        "late syncs": lower(plain("chimera", 4, 4), sync="lazy"),
        "turns": turned,
        "channels": replace(line, channels=(ChannelOrder((0, 1), forwards),)),
        "teams": wide,
        "options": replace(line, options=(("depth", 3), ("name", "Größe"), ("share", 0.25), ("strict", True), ("what", None))),
        "repeats": line.repeated(3),
        "lowered repeats": lower(line.repeated(3)),
        "switches": replace(line, parts=2, ring=True, flush=False),
        "empty lists": replace(line, period=((), (), ())),
        "no lists": Schedule("nothing", Placement.line(1), 1, ()),
        "lowered ties": lower(tied),
        "lowered turns": lower(turned),
        "lowered teams": lower(wide),
    }


def reads_back(schedule: Schedule) -> None:
    again = schedule_from_json(schedule_to_json(schedule))
    assert again == schedule
    assert schedule_to_json(again) == schedule_to_json(schedule)


@pytest.mark.parametrize("name", schedules.names())
def test_a_schedule_reads_back_with_the_same_verdict(name: str) -> None:
    for case in cases(names=[name]):
        for schedule in (case.build(), lower(case.build())):
            reads_back(schedule)
            again = schedule_from_json(schedule_to_json(schedule))
            assert check(again) == check(schedule), case
            assert check(again).ok, case


@pytest.mark.slow
@pytest.mark.parametrize("name", schedules.names())
def test_every_large_schedule_reads_back(name: str) -> None:
    for case in (case for case in large() if case.name == name):
        reads_back(case.build())
        reads_back(lower(case.build()))


@pytest.mark.parametrize("what", with_extras())
def test_a_schedule_with_extras_reads_back(what: str) -> None:
    reads_back(with_extras()[what])


def reads_back_if_at_all(data: dict[str, Any]) -> None:
    try:
        schedule = schedule_from_json(json.dumps(data))
    except MeshwrightError:
        return
    reads_back(schedule)


@FUZZ
@given(schedule_files())
def test_any_schedule_reads_back(data: dict[str, Any]) -> None:
    reads_back_if_at_all(data)


@pytest.mark.slow
@SOAK
@given(schedule_files())
def test_any_schedule_reads_back_for_long(data: dict[str, Any]) -> None:
    reads_back_if_at_all(data)


def test_what_a_file_leaves_out_has_its_default() -> None:
    text = '{"schema": 1, "kind": "schedule", "name": "a", "microbatches": 1, "placement": [[[[0]]]], "period": ["0F0 0B0"]}'
    assert schedule_from_json(text) == Schedule("a", Placement.line(1), 1, ((Action(Op.F, 0, 0), Action(Op.B, 0, 0)),))


def test_a_plain_schedule_makes_a_short_file() -> None:
    data = json.loads(schedule_to_json(plain()))
    assert set(data) == {"schema", "kind", "name", "microbatches", "placement", "period"}
    assert data["period"] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_the_file_keeps_the_period_apart() -> None:
    """Training of any length runs from one file."""
    for name in ("pipedream", "pipedream_2bw", "cyclic"):
        schedule = plain(name, steps=4)
        again = schedule_from_json(schedule_to_json(schedule))
        assert again.repeated(5).lists == schedule.repeated(5).lists
        assert check(again.repeated(5)).ok


WRONG: dict[str, list[Any]] = {
    "schema": [None, "1", 1.5, True, 0, -1, 2, 99, [1], {}],
    "kind": [None, "timeline", 1, ["schedule"]],
    "name": [None, 3, ["onef1b"], {}],
    "microbatches": [None, 0, -1, 1.5, "2", True, 10**9, [2], LONG],
    "placement": [
        *[None, 5, "x", {}, {"a": 1}, [], [[]], [[[]]], [[[[]]]], [0, 1], [[0], [1]], [[[0], [1]]], [[[["0"]], [[1]]]]],
        *[[[[[0, 0]], [[1]]]], [[[[-1]], [[1]]]], [[[[0]], [[True]]]], [[[[0]], [[1]]], [[[0]]]], [[[[0]], [[1.0]]]]],
    ],
    "rows": [None, -1, "2", 1.5, True],
    **{key: [None, -1, "1", 1.5, True] for key in ("repeats", "first")},
    "options": [None, 5, "x", [], [["a", 1]]],
    "parts": [None, 0, "2", 1.5],
    "ties": [None, 5, [5], ["01"], [[-1]], [["0"]], [[0, 1.0]], [[True, 0]]],
    "turns": [None, 5, "x", ["0F0"], [["0F0"]], [["0F0", "zz"]], [["0F0", "[0F0|0B0]"]], [["0F0", 3]], [["0F0", "0F1", "0B0"]]],
    "channels": [None, 5, [5], [[[0], "0F0"]], [[[0, 1, 2], ""]], [[[0, 1], "zz"]], [[[0, 1], 5]], [[["0", 1], ""]]],
    "recompute": [
        *[5, "x", [5, 5], [[0.5], [0.5]], [[0.5, False, 1]] * 2, [[None, False]] * 2, [["0.5", False]] * 2, [[0.5, "no"]] * 2],
        *[[[share, False]] * 2 for share in (-0.5, 1.5, NAN, INFINITY, -INFINITY, 10**400)],
        *[[[True, False]] * 2, [[1.0, 1]] * 2, [[1.0, False]], [[1.0, False]] * 3],
    ],
    **{key: [None, "0F0", ["0F0"], [""] * 3, [0, 1], ["0F0 zz", ""], ["0F", ""], {"0": ""}, 5] for key in ("period", "prologue")},
    "drain": [None, "0F0", ["0F0"], [0, 1], ["zz", ""]],
    **{key: [None, "false", "true", 0, 1, [], 0.5] for key in ("flush", "ring", "lowered", "norm")},
    "colour": ["red"],
    "": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values], ids=short)
def test_a_wrong_type_is_refused_by_its_key(key: str, value: object) -> None:
    data = json.loads(schedule_to_json(plain()))
    with pytest.raises(MeshwrightError) as caught:
        schedule_from_json(json.dumps(data | {key: value}))
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["schema", "kind", "name", "microbatches", "placement", "period"])
def test_a_missing_key_is_named(key: str) -> None:
    data = json.loads(schedule_to_json(plain()))
    del data[key]
    with pytest.raises(MeshwrightError) as caught:
        schedule_from_json(json.dumps(data))
    assert key in str(caught.value)
    assert caught.value.fix


def test_a_newer_file_is_refused_with_both_numbers() -> None:
    data = json.loads(schedule_to_json(plain()))
    with pytest.raises(MeshwrightError, match=r"7.*1") as caught:
        schedule_from_json(json.dumps(data | {"schema": 7}))
    assert caught.value.fix == "update meshwright"
