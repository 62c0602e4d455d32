"""`compare --tensor`: every mode and box with its words and memory, equal to the closed forms; what does not divide is marked."""

from __future__ import annotations

import json
from math import isclose
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.costs.modes import mode
from meshwright.costs.scheme import Save, TensorRequest

SIZES = ("--batch", "8", "--sequence", "1024", "--hidden", "4096", "--ranks", "8")


def table(*more: str) -> Any:
    found = CliRunner().invoke(app, ["compare", "--tensor", "--json", *SIZES, *more])
    assert found.exit_code == 0, found.output
    return json.loads(found.output)


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
    free = table()["best"]
    assert (free["mode"], free["grid"]) == ("box", [2, 4, 1])
    assert all(free["words_forward"] + free["words_backward"] <= row["words_forward"] + row["words_backward"] + row["words_sync"]
               for row in table()["rows"])  # fmt: skip
    none = CliRunner().invoke(app, ["compare", "--tensor", *SIZES, "--memory", "1MB"])
    assert none.exit_code == 3


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
    ],
)
def test_flags_that_contradict_each_other(flags: list[str], text: str) -> None:
    found = CliRunner().invoke(app, ["compare", *flags])
    assert found.exit_code != 0 and text in str(found.exception or found.output)
