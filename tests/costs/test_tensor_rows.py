"""The comparison of modes and boxes: the published best boxes, what does not divide, the best one under a memory limit."""

from __future__ import annotations

import pytest

from meshwright.costs.scheme import Save
from meshwright.costs.tensor_rows import LayerSizes, best_row, tensor_rows


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
