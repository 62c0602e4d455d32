"""Tensor modes without torch: closed forms equal what is declared collective by collective, and the corners of the box agree."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costs import modes
from meshwright.costs.declared import Phase, declared, transformer_layer
from meshwright.costs.scheme import Grid, Save, TensorRequest
from meshwright.errors import MeshwrightError

SIDES = st.integers(1, 5)


def requests() -> st.SearchStrategy[tuple[str, TensorRequest]]:
    line = st.builds(lambda p, cut: ("line", TensorRequest(tp=p, sequence=cut)), st.integers(1, 16), st.booleans())
    grid = st.builds(lambda q: ("grid", TensorRequest(tp=q * q)), SIDES)
    tesseract = st.builds(lambda q, d: ("tesseract", TensorRequest(tp=q * q * d, depth=d)), SIDES, SIDES)
    box = st.builds(lambda w, a, b: ("box", TensorRequest(box=(w, a, b))), SIDES, SIDES, SIDES)
    return st.one_of(line, grid, tesseract, box)


def test_modes_are_the_files_of_the_folder() -> None:
    assert modes.names() == ("box", "grid", "line", "tesseract")


@settings(deadline=None)
@given(requests(), st.sampled_from(Save), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_closed_form_equals_declared(asked: tuple[str, TensorRequest], save: Save, b: int, s: int, h: int) -> None:
    mode = modes.mode(asked[0])
    grid = mode.grid(asked[1])
    total = declared(mode.scheme(grid, save=save), grid, transformer_layer(batch=b, sequence=s, hidden=h))
    assert total.total == mode.layer_words(grid, batch=b, sequence=s, hidden=h, save=save)


@settings(deadline=None)
@given(requests(), st.sampled_from(Save), st.integers(1, 9), st.integers(1, 9))
def test_weights_and_saved_words(asked: tuple[str, TensorRequest], save: Save, rows: int, h: int) -> None:
    """A rank holds 1/P of every matrix, 1/q^2 where there is a depth; kept as shards, 1/P of every input too."""
    mode = modes.mode(asked[0])
    grid = mode.grid(asked[1])
    total = declared(mode.scheme(grid, save=save), grid, transformer_layer(batch=rows, sequence=1, hidden=h))
    copies = dict(grid.sizes).get("d", 1)
    assert total.weight_words == Fraction(12 * h * h * copies, grid.ranks)
    if save is Save.SHARDS and grid.mode != "line":
        assert total.saved_words == Fraction(7 * rows * h, grid.ranks)
    elif grid.mode == "line":
        assert total.saved_words == 2 * rows * h + Fraction(5 * rows * h, grid.ranks)


@settings(deadline=None)
@given(SIDES, st.integers(1, 9), st.integers(1, 9), st.sampled_from(Save))
def test_the_line_with_a_cut_sequence_is_a_box(p: int, rows: int, h: int, save: Save) -> None:
    line, box = modes.mode("line"), modes.mode("box")
    a = line.layer_words(line.grid(TensorRequest(tp=p, sequence=True)), batch=rows, sequence=1, hidden=h, save=save)
    b = box.layer_words(box.grid(TensorRequest(box=(1, p, 1))), batch=rows, sequence=1, hidden=h, save=save)
    assert a == b


def test_fsdp_is_a_box_that_moves_weights_alone() -> None:
    box = modes.mode("box")
    grid = box.grid(TensorRequest(box=(8, 1, 1)))
    small = box.layer_words(grid, batch=1, sequence=1, hidden=64)
    assert small == box.layer_words(grid, batch=64, sequence=8, hidden=64)
    assert small.forward == Fraction(7 * 12 * 64**2, 8) and small.backward == 2 * small.forward


@pytest.mark.parametrize(
    ("mode", "request_", "words"),
    [  # the published comparison at b=30, s=512, h=8192, in millions, forward + backward with gathered operands kept
        ("line", TensorRequest(tp=8), 880.8),
        ("box", TensorRequest(box=(2, 2, 2)), 704.6),
        ("box", TensorRequest(box=(4, 4, 4)), 264.2),
        ("line", TensorRequest(tp=64), 990.9),
    ],
)
def test_known_numbers(mode: str, request_: TensorRequest, words: float) -> None:
    found = modes.mode(mode)
    total = found.layer_words(found.grid(request_), batch=30, sequence=512, hidden=8192, save=Save.GATHERED)
    assert float(total.forward + total.backward) / 1e6 == pytest.approx(words, abs=0.06)


@settings(deadline=None)
@given(requests())
def test_coordinates_and_groups(asked: tuple[str, TensorRequest]) -> None:
    grid = modes.mode(asked[0]).grid(asked[1])
    assert [grid.rank(grid.at(r)) for r in range(grid.ranks)] == list(range(grid.ranks))
    for axis in grid.axes:
        groups = {grid.group(r, (axis,)) for r in range(grid.ranks)}
        assert sorted(r for group in groups for r in group) == list(range(grid.ranks))
        assert all(len(group) == grid.size((axis,)) for group in groups)


@pytest.mark.parametrize(
    ("mode", "asked", "part"),
    [
        ("grid", TensorRequest(tp=8), "square number of ranks, got 8"),
        ("grid", TensorRequest(tp=4, depth=2), "takes no box, depth or sequence"),
        ("tesseract", TensorRequest(tp=9, depth=2), "depth 2 does not divide 9"),
        ("tesseract", TensorRequest(tp=12, depth=2), "square number of ranks, got 6"),
        ("tesseract", TensorRequest(tp=4, sequence=True), "takes a depth"),
        ("box", TensorRequest(tp=6), "6 ranks do not form a cube"),
        ("box", TensorRequest(tp=6, box=(2, 2, 2)), "has 8 ranks, tp=6"),
        ("box", TensorRequest(box=(2, 0, 2)), "three positive numbers"),
        ("box", TensorRequest(box=(2, 1, 2), sequence=True), "neither depth nor sequence"),
        ("line", TensorRequest(), "at least one rank, got tp=None"),
        ("line", TensorRequest(tp=2, box=(1, 2, 1)), "neither a box nor a depth"),
    ],
)
def test_refused(mode: str, asked: TensorRequest, part: str) -> None:
    with pytest.raises(MeshwrightError, match=part) as caught:
        modes.mode(mode).grid(asked)
    assert caught.value.fix


@pytest.mark.parametrize("asked", [TensorRequest(tp=12, depth=2), TensorRequest(tp=6, depth=2), TensorRequest(tp=3)], ids=str)
def test_the_suggested_ranks_make_a_tesseract(asked: TensorRequest) -> None:
    """The suggestions count all layers, and none of them is one rank, which plans refuse."""
    with pytest.raises(MeshwrightError, match=f"a tesseract of {asked.tp} ranks") as caught:
        modes.mode("tesseract").grid(asked)
    *squares, box = re.findall(r"\d+", caught.value.fix)
    assert squares and int(box) == asked.tp
    assert all(modes.mode("tesseract").grid(replace(asked, tp=int(ranks))).ranks == int(ranks) > 1 for ranks in squares)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(MeshwrightError, match="no tensor mode 'tesserakt'; did you mean tesseract"):
        modes.mode("tesserakt")


def test_depth_is_summed_when_gradients_are_added_up() -> None:
    mode = modes.mode("tesseract")
    grid = mode.grid(TensorRequest(tp=8, depth=2))
    total = declared(mode.scheme(grid), grid, transformer_layer(batch=4, sequence=4, hidden=8))
    assert total.words(Phase.SYNC) == 2 * Fraction(1, 2) * Fraction(12 * 64, 4)
    assert {t.axes for t in total.transfers if t.phase is Phase.SYNC} == {("d",)}
    assert isinstance(grid, Grid) and str(grid) == "tesseract d=2 x i=2 x j=2"
