"""`compare --tensor`: every mode and box with its words and memory, equal to the closed forms; what does not divide is marked."""

from __future__ import annotations

import json
import subprocess
import sys
from math import isclose
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli._parts.mode_flags import ModeFlags
from meshwright.cli._parts.tensor_comparison import flags_of
from meshwright.costs.modes import mode
from meshwright.costs.planned_grid import planned_grid
from meshwright.costs.scheme import Save, TensorRequest
from meshwright.costs.tensor_rows import TensorRow
from meshwright.ir.plan.plan import Parallel
from tests.support.command import app

SIZES = ("--batch", "8", "--sequence", "1024", "--hidden", "4096", "--ranks", "8")


def table(*more: str) -> Any:
    found = CliRunner().invoke(app, ["compare", "--tensor", "--json", *SIZES, *more])
    assert found.exit_code == 0, found.output
    return json.loads(found.output)


def step_words(found: Any, row: Any) -> float:
    """All words of a step of one microbatch."""
    once = [each["words_sync"] for each in found["once_per_step"] if (each["mode"], each["grid"]) == (row["mode"], row["grid"])]
    return row["words_forward"] + row["words_backward"] + sum(once)


@pytest.mark.parametrize("save", list(Save))
def test_rows_are_the_closed_forms(save: Save) -> None:
    rows = table("--save", save)["rows"]
    assert {row["mode"] for row in rows} == {"line", "line_sequence", "tesseract", "box"}, "8 is no square"
    boxes = [row for row in rows if row["mode"] == "box"]
    assert len(boxes) == 10 and all(row["feasible"] for row in boxes)
    for row in boxes:
        grid = mode("box").grid(TensorRequest(box=tuple(row["grid"])))
        words = mode("box").layer_words(grid, batch=8, sequence=1024, hidden=4096, save=save)
        assert isclose(row["words_forward"], words.forward) and isclose(row["words_backward"], words.backward)
        assert row["weight_words"] == 12 * 4096**2 / 8


def test_the_best_box_within_a_limit() -> None:
    found = table()
    free = found["best"]
    assert (free["mode"], free["grid"]) == ("box", [2, 4, 1])
    assert step_words(found, free) == min(step_words(found, row) for row in found["rows"])
    none = CliRunner().invoke(app, ["compare", "--tensor", *SIZES, "--memory", "1MB"])
    assert none.exit_code == 3 and none.output.splitlines()[-1] == "no mode divides these sizes and fits within 1MB"
    some = CliRunner().invoke(app, ["compare", "--tensor", *SIZES, "--memory", "250MB"]).output.splitlines()
    assert some[-1] == "best within 250MB: box 2 x 4 x 1, 201 M words, 0.218 GB per rank: --box 2,4,1"
    assert [line.split()[0] for line in some if line.endswith("more than 250MB")] == ["line", "tesseract"]


def test_what_does_not_divide_is_marked() -> None:
    found = table("--heads", "6")["rows"]
    refused = [row for row in found if not row["feasible"]]
    assert refused and all("heads 6 does not divide by" in row["reason"] for row in refused)
    shown = CliRunner().invoke(app, ["compare", "--tensor", *SIZES, "--heads", "6"])
    assert "heads 6 does not divide by 8 (p)" in shown.output


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--batch", "8"], "--batch 8 is a size of a tensor mode"),
        (["--tensor", "--batch", "8"], "--tensor needs --sequence"),
        (["--tensor", *SIZES[:-1], "0"], "--ranks must be a whole number of at least 1, got 0"),
        (["--tensor", *SIZES, "-w", "2"], "--tensor compares tensor modes, not schedules"),
        (["--tensor", *SIZES, "--memory", "much"], "--memory much is not a size in bytes"),
        (["--tensor", *SIZES, "--save", "most"], "--save must be shards or gathered, got 'most'"),
        (["--tensor", *SIZES, "gpt-tiny", "gpt-small"], "--tensor compares modes for one model, got 2"),
        (["--tensor", *SIZES, "--batch-function", "a:b"], "no model is given"),
        (["--tensor", "gpt-tiny", "--ranks", "4"], "--tensor needs --batch"),
        (["--tensor", *SIZES, "--counted"], "--counted runs the products: 5e+07 words are more than"),
        (["--tensor", "gpt-tiny", "--ranks", "4", "--batch", "8", "--heads", "4"], "gpt-tiny has its own heads"),
        (["--tensor", "gpt-tiny", "--ranks", "4", "--batch", "8", "--hidden", "7"], "gpt-tiny has no matrix of width 7"),
    ],
)
def test_flags_that_contradict_each_other(flags: list[str], text: str) -> None:
    found = CliRunner().invoke(app, ["compare", *flags])
    assert found.exit_code != 0 and text in str(found.exception or found.output)


def test_rows_have_the_promised_keys() -> None:
    promised = {"mode", "grid", "words_forward", "words_backward", "steps", "weight_words", "saved_words", "feasible", "reason"}
    found = table()
    for row in [*found["rows"], found["best"]]:
        assert promised == set(row) and all(type(side) is int for side in row["grid"])
    assert found["once_per_step"] == [{"mode": "tesseract", "grid": [2, 2, 2], "words_sync": 24 * 4096**2 // 8}]


def test_the_closed_forms_need_no_torch() -> None:
    code = (
        "import sys, contextlib, meshwright.cli.main as command\n"
        f"sys.argv = ['meshwright', 'compare', '--tensor', *{SIZES!r}]\n"
        "with contextlib.suppress(SystemExit): command.main()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        (TensorRow("box", (2, 2, 1)), "--box 2,2,1"),
        (TensorRow("line", (4,)), "--tp 4"),
        (TensorRow("line_sequence", (4,)), "--tp 4 --sequence-parallel"),
        (TensorRow("grid", (2, 2)), "--tensor-mode grid --tp 4"),
        (TensorRow("tesseract", (2, 2, 2)), "--tensor-mode tesseract --tp 8 --depth 2"),
    ],
)
def test_the_best_row_is_named_by_flags_that_ask_for_it(row: TensorRow, flags: str) -> None:
    assert flags_of(row) == flags
    words = iter(flags.split())
    given = {word.removeprefix("--").replace("-", "_"): True if word.startswith("--seq") else next(words) for word in words}
    given |= {name: int(str(given[name])) for name in ("tp", "depth") if name in given}
    found = planned_grid(Parallel.of(ModeFlags(**given).plan_fields()))
    assert found is not None and found.mode == row.mode and tuple(size for _, size in found.sizes) == row.grid


def captured(*more: str) -> Any:
    words = ["compare", "--tensor", "gpt-tiny", "--batch", "8", "--sequence", "32", "--ranks", "4", "--json", *more]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.exception
    return json.loads(found.output)


def test_a_captured_model_has_the_words_that_inspect_shows() -> None:
    """Everything is included, so a model of four layers sends more than four times the products of a layer."""
    found = captured("--hidden", "48")
    rows = {(row["mode"], tuple(row["grid"])): row for row in found["rows"]}
    assert set(rows) == {
        *(("line", (4,)), ("line_sequence", (4,)), ("grid", (2, 2))),
        *(("box", box) for box in [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]),
    }
    row = rows["box", (2, 2, 1)]
    words = ["inspect", "gpt-tiny", "--box", "2,2,1", "--rows", "8", "--length", "32", "--stages", "1", "--json"]
    shown = json.loads(CliRunner().invoke(app, words).output)["tensor"]
    assert row["words_forward"] == shown["words"]["forward"] and row["words_backward"] == shown["words"]["backward"]
    assert step_words(found, row) == sum(shown["words"].values())
    assert (row["weight_words"], row["saved_words"]) == (shown["weight_words"], shown["saved_words"])
    grid = mode("box").grid(TensorRequest(box=(2, 2, 1)))
    layer = mode("box").layer_words(grid, batch=8, sequence=32, hidden=48)
    assert 4 * layer.forward < row["words_forward"] < 6 * layer.forward
    assert step_words(found, found["best"]) == min(step_words(found, row) for row in rows.values() if row["feasible"])


def test_a_captured_model_marks_what_it_cannot_run() -> None:
    words = ["compare", "--tensor", "gpt-tiny", "--batch", "6", "--ranks", "4", "--json"]
    found = json.loads(CliRunner().invoke(app, words).output)["rows"]
    row = next(row for row in found if row["grid"] == [4, 1, 1])
    assert not row["feasible"] and row["reason"].startswith("the rows of a microbatch: size 6 does not divide by 4 (w=4)")
    assert row["words_forward"] is None and row["steps"] is None
    assert [row["feasible"] for row in found] == sorted((row["feasible"] for row in found), reverse=True)
    assert next(row for row in found if row["mode"] == "line")["feasible"], "a line cuts no rows"


def test_counted_words_are_those_of_the_formulas() -> None:
    words = ["compare", "--tensor", "--batch", "8", "--sequence", "4", "--hidden", "64", "--ranks", "8", "--counted"]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert len(found["rows"]) == 13 and [row["mode"] for row in found["once_per_step"]] == ["tesseract"]
    for row in found["rows"]:
        assert all(row[f"counted_{phase}"] == row[f"words_{phase}"] for phase in ("forward", "backward")), row
    assert all(row["counted_sync"] == row["words_sync"] for row in found["once_per_step"])
    shown = CliRunner().invoke(app, words).output.splitlines()
    assert shown[0].split() == ["mode", "grid", *("forward", "counted", "backward", "counted", "sync", "counted")]
    assert any(line.startswith("tesseract") for line in shown) and len(shown) == 15
