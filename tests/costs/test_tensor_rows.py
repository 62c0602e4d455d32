"""The comparison of modes and boxes: the published best boxes, what does not divide, the best one under a memory limit."""

from __future__ import annotations

import re

import pytest

from meshwright.costs.scheme import Save
from meshwright.costs.tensor_rows import LayerSizes, best_row, tensor_rows
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("ranks", "ratio", "box"),
    [  # the best boxes with gathered operands kept, by batch x sequence over hidden
        (8, 24.0, (8, 1, 1)),
        (8, 4.0, (4, 2, 1)),
        (8, 1.875, (2, 4, 1)),
        (8, 0.25, (1, 4, 2)),
        (64, 24.0, (16, 4, 1)),
        (64, 4.0, (8, 4, 2)),
        (64, 0.25, (1, 16, 4)),
    ],
)
def test_the_best_boxes(ranks: int, ratio: float, box: tuple[int, int, int]) -> None:
    sizes = LayerSizes(batch=int(ratio * 1024), sequence=1, hidden=1024)
    rows = [row for row in tensor_rows(sizes, ranks=ranks, save=Save.GATHERED) if row.mode == "box"]
    assert min(rows, key=lambda row: row.words).grid == box


def test_three_dimensions_win_only_where_rows_are_many() -> None:
    def cube_over_line(rows: int) -> float:
        found = {(row.mode, row.grid): row for row in tensor_rows(LayerSizes(batch=rows, sequence=1, hidden=1024), ranks=8)}
        return float(found["box", (2, 2, 2)].words / found["line", (8,)].words)

    assert cube_over_line(256) > 2 and cube_over_line(16 * 1024) < 1


def test_what_does_not_divide_is_named_and_comes_last() -> None:
    rows = tensor_rows(LayerSizes(batch=6, sequence=12, hidden=96, heads=12), ranks=8)
    reasons = {(row.mode, row.grid): row.reason for row in rows}
    assert reasons["line", (8,)] == "heads 12 does not divide by 8 (p)"
    assert reasons["box", (2, 2, 2)] == "batch 6 does not divide by 4 (w, b)"
    assert reasons["box", (2, 4, 1)] == ""
    assert [row.feasible for row in rows] == sorted((row.feasible for row in rows), reverse=True)


def test_the_best_row_under_a_memory_limit() -> None:
    rows = tensor_rows(LayerSizes(batch=64, sequence=64, hidden=1024, heads=16), ranks=8)
    free, tight = best_row(rows), best_row(rows, limit_words=12 * 1024**2 / 8 + 7 * 64 * 64 * 1024 / 8)
    assert free is not None and tight is not None
    assert free.words <= tight.words and tight.saved_words == 7 * 64 * 64 * 1024 // 8
    assert best_row(rows, limit_words=1.0) is None


def test_every_mode_is_there() -> None:
    rows = tensor_rows(LayerSizes(batch=64, sequence=1, hidden=64), ranks=16)
    assert {row.mode for row in rows} == {"line", "line_sequence", "grid", "tesseract", "box"} - {"tesseract"}
    assert {row.mode for row in tensor_rows(LayerSizes(batch=64, sequence=1, hidden=64), ranks=8)} >= {"tesseract", "box"}


def test_the_table_of_the_docs() -> None:
    """Words over those of a line, for the best box that divides the batch and for the cube."""
    shown = re.findall(r"^\| (\d+) \| [\d.]+ \| (.*) \|$", (ROOT / "docs" / "tensor.md").read_text(), re.MULTILINE)
    assert len(shown) == 7
    for batch, cells in shown:
        numbers = iter(cells.split(" | "))
        for ranks, side, save in ((8, 2, Save.GATHERED), (8, 2, Save.SHARDS), (64, 4, Save.SHARDS)):
            rows = tensor_rows(LayerSizes(batch=int(batch), sequence=1024, hidden=4096), ranks=ranks, save=save)
            line = next(row for row in rows if row.mode == "line")
            best = next(row for row in rows if row.mode == "box" and row.feasible)
            cube = next(row for row in rows if row.grid == (side, side, side) and row.mode == "box")
            assert next(numbers) == f"{best.grid} {float(best.words / line.words):.2f}"
            assert next(numbers) == f"{float(cube.words / line.words):.2f}"


@pytest.mark.parametrize(
    ("ranks", "save", "least"),
    [(8, Save.GATHERED, 1.0), (8, Save.SHARDS, 36 / 17), (64, Save.GATHERED, 3 / 17), (64, Save.SHARDS, 12 / 43)],
)
def test_from_where_on_the_cube_sends_less_than_a_line(ranks: int, save: Save, least: float) -> None:
    side = round(ranks ** (1 / 3))
    for share, wins in ((0.99, False), (1.01, True)):
        rows = tensor_rows(LayerSizes(batch=round(least * share * 2**20), sequence=1, hidden=2**20), ranks=ranks, save=save)
        words = {(row.mode, row.grid): row.words for row in rows}
        assert (words["box", (side, side, side)] < words["line", (ranks,)]) == wins
