"""What is unusable is refused with its numbers: files that stand for too much, malformed schedules, options without effect."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import (
    Action,
    MeshwrightError,
    Op,
    Placement,
    Schedule,
    check,
    even_costs,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
)
from meshwright.cli._parts.cost_flags import CostFlags
from meshwright.cli.compare import compare
from meshwright.ir.action import Cell, Transfer, parse
from meshwright.ir.files.schedule_csv import to_csv
from meshwright.ir.schedule import Recompute
from meshwright.passes.widen import widen
from meshwright.simulate.recompute_budget import stage_aware

ONEF1B = schedules.build("onef1b", workers=4, microbatches=8)

LONG = {"schema": 1, "kind": "schedule", "name": "x", "microbatches": 1, "placement": [[[[0]]]], "period": ["0F0 0B0"]}


@pytest.mark.parametrize(
    "more",
    [
        {"repeats": 999_999_999},
        {"parts": 999_999_999},
        {"placement": [[[[999_999_998]]]], "period": [], "repeats": 0},
        {"period": ["0F0 0B0" + " 0F0 0B0" * 99], "repeats": 25_001},
        {"period": [""], "repeats": 5_000_000, "turns": [["0F0", "0B0"]]},
    ],
)
def test_a_file_that_unrolls_to_too_much_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(MeshwrightError, match=r"unrolls to [0-9]+ entries .*the limit is 5000000") as found:
        schedule_from_json(json.dumps({**LONG, **more}))
    assert "repeats" in str(found.value.fix)


def test_a_large_schedule_is_still_read() -> None:
    schedule = schedules.build("gpipe", workers=64, microbatches=4096)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule


def test_many_repeats_are_still_read_and_proved() -> None:
    schedule = schedule_from_json(json.dumps({**LONG, "repeats": 1000}))
    assert check(schedule).ok and lower(schedule).steps == 1000


def line(*teams: tuple[tuple[int, ...], ...]) -> Placement:
    return Placement((teams,))


MALFORMED: dict[str, dict[str, Any]] = {
    "microbatches .* at least 1, got 0": {"microbatches": 0},
    "microbatches .* got 8.0": {"microbatches": 8.0},
    "repeats .* got -1": {"repeats": -1},
    "parts .* at least 1, got 0": {"parts": 0},
    "not a Placement but NoneType": {"placement": None},
    "every replica needs the same stages": {"placement": Placement(())},
    r"at least one, got \[0\]": {"placement": Placement(((),))},
    "teams of a placement are tuples": {"placement": Placement((((0, 1, 2, 3),),))},  # type: ignore[arg-type]
    "stage 1 of replica 0 has no team": {"placement": line(((0,),), (), ((2,),), ((3,),))},
    "stage 1 of replica 0 has a team without workers": {"placement": line(((0,),), ((),), ((2,),), ((3,),))},
    r"workers of a team must differ, got \(1, 1\)": {"placement": line(((0,),), ((1, 1),), ((2,),), ((3,),))},
    r"at least 0, got \(-1,\)": {"placement": line(((0,),), ((-1,),), ((2,),), ((3,),))},
    "whole number of rows": {"placement": replace(ONEF1B.placement, rows=-1)},
    "one tuple of entries per worker": {"period": ("0F0",) * 4},
    "'0F0' in the period of worker 0 is not an entry": {"period": (("0F0",),) * 4},
    "in the drain of worker 0 is not an entry": {"drain": ((Action("F", 0, 0),),) * 4},  # type: ignore[arg-type]
    r"Cell\(.* is not an entry": {"period": ((Cell(Action(Op.F, 0, 0), None),),) * 4},  # type: ignore[arg-type]
    r"Transfer\(.* is not an entry": {"period": ((Transfer(True, None, 1),),) * 4},  # type: ignore[arg-type]
    "4 workers, but there are 1 lists": {"prologue": ((),)},
    "stage 0 recomputes a share of 2.0": {"recompute": (Recompute(2.0),) * 4},
    "share of nan": {"recompute": (Recompute(float("nan")),) * 4},
    "one Recompute": {"recompute": (1.0,) * 4},
    "ties are tuples": {"ties": (0,)},
    "turns are pairs": {"turns": ((Action(Op.F, 0, 0),),)},
    "a channel joins": {"channels": ("0F0",)},
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_check_says_what_is_malformed(reason: str) -> None:
    schedule = replace(ONEF1B, **MALFORMED[reason])
    result = check(schedule)
    assert not result.ok and result.law == "placement" and result.reason and "None" not in str(result)[:20]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(result.reason)
    with pytest.raises(MeshwrightError, match=reason):
        lower(schedule)


@pytest.mark.parametrize("width", [[0, 1, 1, 1], [1, -1, 1, 1], [1, 1.5, 1, 1], [1, True, 1, 1], [1, 1, 1, float("nan")]])
def test_a_width_is_at_least_one_worker(width: list[int]) -> None:
    with pytest.raises(MeshwrightError, match="whole number of workers, at least one"):
        widen(ONEF1B, width)


@pytest.mark.parametrize("share", [2.0, -0.5, float("nan"), float("inf"), "1"])
def test_a_share_of_recompute_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(MeshwrightError, match="not between 0 and 1"):
        lower(ONEF1B, recompute=[Recompute(share)] * 4)


def test_a_turn_needs_both_its_ends() -> None:
    """Whether its writer or its reader is missing; beyond the end of the run both may be."""
    here, nowhere, later = Action(Op.F, 0, 1), Action(Op.F, 0, 1, replica=3), Action(Op.F, 0, 8)
    for turn in ((here, nowhere), (nowhere, here)):
        result = check(replace(ONEF1B, turns=(turn,)))
        assert not result.ok and result.reason and "0F1@3, which no worker runs" in result.reason
    assert check(replace(ONEF1B, turns=((here, later),))).ok
    for steps in (1, 2, 3, 5):
        assert check(schedules.build("cyclic", workers=4, microbatches=4, steps=steps)).ok


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("onef1b", {"warmup": 4, "memory": 4}, "memory=4 .* warmup=4"),
        ("listed", {"strict": True, "memory": 4}, "strict=true .* memory=4"),
        ("zero_bubble", {"variant": "h1", "rest": 0.5}, "rest needs variant=auto, got variant=h1"),
        ("zero_bubble", {"variant": "h2", "span": True}, "span needs variant=auto, got variant=h2"),
        ("zero_bubble", {"rest": float("nan")}, "option rest cannot be nan"),
    ],
)
def test_an_option_without_effect_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(MeshwrightError, match=reason) as found:
        schedules.build(name, workers=4, microbatches=8, **options)
    assert found.value.fix


def test_options_that_go_together_still_do() -> None:
    for name, options in (("listed", {"memory": 4}), ("listed", {"strict": False, "memory": 4}), ("onef1b", {"memory": 4})):
        assert check(schedules.build(name, workers=4, microbatches=8, **options)).ok
    plain, strict = (schedules.build("listed", workers=4, microbatches=8, **o) for o in ({}, {"strict": True}))
    assert plain.channels and plain.lists == strict.lists


def test_a_budget_is_a_number() -> None:
    with pytest.raises(MeshwrightError, match="budget is not a number"):
        stage_aware(ONEF1B, even_costs(stages=4, workers=4), budget_bytes=float("nan"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"stages": 0, "workers": 4}, "at least 1 stage and 1 worker, got 0 and 4"),
        ({"stages": 4, "workers": 0}, "at least 1 stage and 1 worker, got 4 and 0"),
        ({"stages": 4, "workers": 4, "split": (0, 0)}, "ratio"),
        ({"stages": 4, "workers": 4, "split": (2, -1)}, "ratio"),
        ({"stages": 4, "workers": 4, "forward_s": -1.0}, "forward_s"),
    ],
)
def test_even_costs_refuses_sizes_and_ratios_of_nothing(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(MeshwrightError, match=reason):
        even_costs(**given)


@pytest.mark.parametrize("text", ["[0F0|0F1]", "[0F1|0I0]", "[0B0|0F1]"])
def test_csv_refuses_cells_that_it_could_not_read_back(text: str) -> None:
    cell = parse(text)
    with pytest.raises(MeshwrightError, match="cannot express a cell other than"):
        to_csv(Schedule("cells", Placement.line(1), 2, ((cell,),)))


@pytest.mark.parametrize("schema", [0, -1, "1", True, None, 1.0])
def test_what_is_no_schema_number_is_not_a_newer_one(schema: object) -> None:
    with pytest.raises(MeshwrightError, match="is not a schema number") as found:
        schedule_from_json(json.dumps({**LONG, "schema": schema}))
    assert found.value.fix == '"schema": 1'


def test_a_key_that_comes_twice_is_refused() -> None:
    text = json.dumps(LONG)
    for more, key in (('"name": "y"', "name"), ('"options": {"a": 1, "a": 2}', "a")):
        with pytest.raises(MeshwrightError, match=f"has the key '{key}' twice"):
            schedule_from_json(text[:-1] + f", {more}}}")


@pytest.mark.parametrize("split", ["nan:1", "1:nan", "inf:1", "0:0", "-1:2"])
def test_a_split_is_a_ratio_of_numbers(split: str) -> None:
    with pytest.raises(MeshwrightError, match="--split must be a ratio of positive numbers") as found:
        CostFlags(split=split).even(stages=4, workers=4)
    assert found.value.fix == "--split 1:1"


def test_compare_refuses_a_cost_file_that_fits_no_schedule_at_once(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps([{"forward_s": 1.0}] * 3))
    with pytest.raises(MeshwrightError, match="fits no schedule: 4 workers have 4 stages or a multiple, which 3 rows") as found:
        compare(workers=4, microbatches=8, file=file)
    assert found.value.fix == "one row per stage: 4" and "\n" not in found.value.what
