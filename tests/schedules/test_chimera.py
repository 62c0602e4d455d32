"""Chimera: the worked grids cell by cell, the five-phase program, every closed form, and which syncs are eager."""

from __future__ import annotations

import pytest

from meshwright import lower, schedules
from meshwright.ir.action import Action, Op
from meshwright.ir.text_grid import columns, label
from tests.support.helpers import idle, peaks, run

FOUR_UNIT = """
F0d  F1d  .    F2u  B2u  F3u  B3u  B0d  .    B1d
.    F0d  F2u  F1d  F3u  B2u  B0d  B3u  B1d  .
.    F2u  F0d  F3u  F1d  B0d  B2u  B1d  B3u  .
F2u  F3u  .    F0d  B0d  F1d  B1d  B2u  .    B3u
"""
FOUR_REAL = """
F0d  F1d  .    F2u  B2u  =    F3u  B3u  =    .    B0d  =    .    .    B1d  =
.    F0d  F2u  F1d  F3u  .    B2u  =    B0d  =    B3u  =    B1d  =    .    .
.    F2u  F0d  F3u  F1d  .    B0d  =    B2u  =    B1d  =    B3u  =    .    .
F2u  F3u  .    F0d  B0d  =    F1d  B1d  =    .    B2u  =    .    .    B3u  =
"""
EIGHT_UNIT = """
F0d F1d F2d F3d .   .   .   F4u B4u F5u B5u F6u B6u F7u B7u B0d .   B1d .   B2d .   B3d
.   F0d F1d F2d .   .   F4u F3d F5u B4u F6u B5u F7u B6u B0d B7u B1d .   B2d .   B3d .
.   .   F0d F1d .   F4u F2d F5u F3d F6u B4u F7u B5u B0d B6u B1d B7u B2d .   B3d .   .
.   .   .   F0d F4u F1d F5u F2d F6u F3d F7u B4u B0d B5u B1d B6u B2d B7u B3d .   .   .
.   .   .   F4u F0d F5u F1d F6u F2d F7u F3d B0d B4u B1d B5u B2d B6u B3d B7u .   .   .
"""
EIGHT_REAL = """
F0 F1 F2 F3 . . . F4 B4= F5 B5= F6 B6= F7 B7= . . . B0= . . B1= . . B2= . . B3=
. F0 F1 F2 . . F4 F3 F5 . B4= F6 B5= F7 B6= . . B0= B7= B1= . . B2= . . B3= . .
. . F0 F1 . F4 F2 F5 F3 F6 . . B4= F7 B5= . B0= B6= B1= B7= B2= . . B3= . . . .
. . . F0 F4 F1 F5 F2 F6 F3 F7 . . . B4= B0= B5= B1= B6= B2= B7= B3= . . . . . .
"""
TWO_PAIRS = """
F0  .   F1  F6  F2  F7  F3  F4  B4  F5  B5  B2  B6  B3  B7  B0  .   B1
.   F0  F6  F1  F7  F2  F4  F3  F5  B4  B2  B5  B3  B6  B0  B7  B1  .
.   F6  F0  F7  F1  F4  F2  F5  F3  B2  B4  B3  B5  B0  B6  B1  B7  .
F6  .   F7  F0  F4  F1  F5  F2  B2  F3  B3  B4  B0  B5  B1  B6  .   B7
"""
DIRECT = """
F0 F1 . F2 B2= F3 B3= . B0= F4 . B1= F5 F6 B6= F7 B7= . B4= . . B5=
. F0 F2 F1 F3 . B2= B0= B3= B1= F4 F6 . F5 F7 . B6= B4= B7= B5= . .
"""
DOUBLING = """
F0 F1 F2 F3 F4 F5 B4= F6 F7 B5= . B0= B6= B1= B7= B2= . . B3=
. F0 F1 F4 F5 F2 F3 F6 F7 B4= B0= B5= B1= B6= B2= B7= B3= . .
"""


def grid(name: str, d: int, n: int, forward: float, backward: float, directions: bool, **options: object) -> list[list[str]]:
    timeline = run(name, d, n, forward, backward, **options)
    rows = [
        [(round(s.start_s), round(s.end_s - s.start_s), label(s.entry, replicas=2 if directions else 1)) for s in spans]
        for spans in timeline.compute
    ]
    return columns(rows, round(timeline.makespan_s))


def expected(text: str) -> list[list[str]]:
    return [row.replace("=", " = ").split() for row in text.strip().splitlines()]


def test_four_workers_at_unit_cost_cell_by_cell() -> None:
    assert grid("chimera", 4, 4, 1, 1, True) == expected(FOUR_UNIT)


def test_four_workers_at_twice_the_forward_cell_by_cell() -> None:
    assert grid("chimera", 4, 4, 1, 2, True) == expected(FOUR_REAL)


def test_eight_workers_cell_by_cell() -> None:
    unit = grid("chimera", 8, 8, 1, 1, True)
    assert unit[:5] == expected(EIGHT_UNIT)
    swapped = [[cell.translate(str.maketrans("du", "ud")) for cell in row] for row in unit[:3]]
    numbers = str.maketrans("01234567", "45670123")
    assert unit[:4:-1] == [[cell.translate(numbers) for cell in row] for row in swapped]
    assert grid("chimera", 8, 8, 1, 2, False)[:4] == expected(EIGHT_REAL)


def test_units_in_a_row_cell_by_cell() -> None:
    assert grid("chimera", 4, 8, 1, 2, False)[:2] == expected(DIRECT)
    assert grid("chimera", 4, 8, 1, 2, False, mode="doubling")[:2] == expected(DOUBLING)


def test_halves_of_backwards_in_order() -> None:
    lists = schedules.build("chimera", workers=4, microbatches=4, mode="halving").lists
    shown = [" ".join(f"{a.op.value}{a.mb}{'' if a.part < 0 else 'ab'[a.part]}" for a in entries) for entries in lists[:2]]
    assert shown[0] == "F0 F1 F2 B2a F3 B2b B0a B3a B0b B3b B1a B1b"
    assert shown[1] == "F0 F2 F1 F3 B2a B0a B2b B0b B3a B1a B3b B1b"


def test_two_pairs_in_the_order_of_the_paper() -> None:
    timeline = run("chimera", 8, 8, 1, 1, pairs=2)
    order = [[f"{s.entry.op.value}{s.entry.mb}" for s in spans] for spans in timeline.compute]
    assert order[:4] == [[cell for cell in row if cell != "."] for row in expected(TWO_PAIRS)]
    assert timeline.makespan_s == 18


def phases(d: int, w: int) -> list[tuple[str, str]]:
    """The five phases of a worker: (op, major or minor)."""
    h = d // 2
    a = h - w if w < h else w - h + 1
    b = h - a
    program = [("F", "major")] * a + [("F", "minor"), ("F", "major")] * b + [("F", "minor"), ("B", "minor")] * a
    return program + [("B", "major"), ("B", "minor")] * b + [("B", "major")] * a


@pytest.mark.parametrize("d", [2, 4, 6, 8, 16, 32, 64])
def test_the_slots_are_the_five_phase_program(d: int) -> None:
    for w, entries in enumerate(schedules.build("chimera", workers=d, microbatches=d).lists):
        found = [(a.op.value, "major" if (a.stage < d // 2) else "minor") for a in entries if isinstance(a, Action)]
        assert found == phases(d, w)


@pytest.mark.parametrize("d", [2, 4, 6, 8, 16])
@pytest.mark.parametrize(("f", "b"), [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0), (1.0, 3.0)])
def test_base_unit(d: int, f: float, b: float) -> None:
    timeline = run("chimera", d, d, f, b)
    assert timeline.makespan_s == pytest.approx(d * f + (2 * d - 2) * b)
    assert idle(timeline) == pytest.approx([(d - 2) * b] * d)
    assert min(peaks(timeline)) == d / 2 + 1 and max(peaks(timeline)) == d
    assert set(timeline.parameter_copies) == {2.0}


@pytest.mark.parametrize("d", [4, 8, 12])
def test_fewer_microbatches_than_workers(d: int) -> None:
    for n in range(2, d, 2):
        timeline = run("chimera", d, n, 1, 1)
        assert timeline.makespan_s == 2 * d + n - 2
        assert idle(timeline) == [2 * d - n - 2] * d


@pytest.mark.parametrize(("d", "f"), [(4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (12, 2), (12, 3), (16, 2), (16, 4)])
def test_more_pairs(d: int, f: int) -> None:
    unit, real = run("chimera", d, d, 1, 1, pairs=f), run("chimera", d, d, 1, 2, pairs=f)
    assert idle(unit) == [d / f - 2] * d
    assert idle(real) == [2 * (d / f - 2)] * d
    assert unit.bubble_ratio == pytest.approx((d - 2 * f) / (2 * f * d + d - 2 * f))
    assert set(unit.parameter_copies) == {2.0 * f}
    if f < d / 2:
        assert (min(peaks(unit)), max(peaks(unit))) == (d - d / (2 * f) + 1, d)


@pytest.mark.parametrize("d", [2, 4, 6, 8])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize(("f", "b"), [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)])
def test_direct_concatenation(d: int, k: int, f: float, b: float) -> None:
    n = k * d
    timeline = run("chimera", d, n, f, b)
    assert timeline.makespan_s == pytest.approx(n * (f + b) + (d - 2) * (b + (k - 1) * (b - f)))
    assert (min(peaks(timeline)), max(peaks(timeline))) == (d / 2 + 1, d)


@pytest.mark.parametrize("d", [2, 4, 6, 8])
@pytest.mark.parametrize("k", [2, 4, 6])
def test_forward_doubling(d: int, k: int) -> None:
    n, h = k * d, d // 2
    timeline = run("chimera", d, n, 1, 2, mode="doubling")
    assert timeline.makespan_s == n * 3 + (h - 1) * 3
    assert timeline.bubble_ratio == pytest.approx((d - 2) / (2 * n + d - 2))
    assert (min(peaks(timeline)), max(peaks(timeline))) == (3 * d / 2 + 1, 2 * d)
    recomputed = run("chimera", d, n, 1, 2, recompute=1.0, mode="doubling")
    assert idle(recomputed)[0] == pytest.approx((h - 1) * 4 + (k / 2 - 1) * (d - 2))


@pytest.mark.parametrize("d", [2, 4, 6, 8])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_backward_halving(d: int, k: int) -> None:
    n, h = k * d, d // 2
    timeline = run("chimera", d, n, 1, 2, mode="halving")
    assert timeline.makespan_s == n * 3 + (h - 1) * 2
    assert timeline.bubble_ratio == pytest.approx((d - 2) / (3 * n + d - 2))
    assert (min(peaks(timeline)), max(peaks(timeline))) == (3 * d / 4 + 0.5, d)
    both = run("chimera", d, n, 1, 2, mode="halving", half_forward=True)
    assert both.bubble_ratio == pytest.approx((d - 2) / (4 * n + d - 2))


@pytest.mark.parametrize("d", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_split_backward(d: int, k: int) -> None:
    n = k * d
    timeline = run("chimera", d, n, 1, 2, split=True)
    assert timeline.makespan_s == 3 * n + d / 2 - 1
    assert max(peaks(timeline)) <= d


def test_split_backward_over_units_by_number() -> None:
    assert [run("chimera", d, n, 1, 2, split=True).makespan_s for d, n in ((4, 4), (6, 6), (8, 8), (4, 8), (6, 12))] == [
        13,
        20,
        27,
        25,
        38,
    ]


@pytest.mark.parametrize("d", [2, 4, 6, 8])
@pytest.mark.parametrize("n", [2, 4, 8, 10, 24])
def test_steady_has_no_seam_between_units(d: int, n: int) -> None:
    timeline = run("chimera", d, n, 1, 2, mode="steady")
    assert timeline.makespan_s == (3 * n + (d - 2) * 2 if n >= d else 3 * d + (n - 2) * 2)
    assert max(peaks(timeline)) <= d


def test_direct_loses_to_1f1b_from_three_units_on_and_steady_does_not() -> None:
    for k in (3, 8):
        plain = run("onef1b", 8, 8 * k).makespan_s
        assert run("chimera", 8, 8 * k).makespan_s > plain > run("chimera", 8, 8 * k, mode="steady").makespan_s


def syncs_before_last_backward(d: int, policy: str) -> set[int]:
    """The stages whose sync stands before the last backward of its worker."""
    early = set()
    for entries in lower(schedules.build("chimera", workers=d, microbatches=d), sync=policy).lists:
        last = max(i for i, e in enumerate(entries) if isinstance(e, Action) and e.op is Op.B)
        early |= {e.stage for i, e in enumerate(entries) if i < last and isinstance(e, Action) and e.op is Op.S}
    return early


@pytest.mark.parametrize("d", [4, 6, 8, 16])
def test_eager_opt_is_exactly_the_stages_above_the_middle(d: int) -> None:
    assert syncs_before_last_backward(d, "eager-opt") == set(range(d // 2 + 1, d))
    assert syncs_before_last_backward(d, "eager") == set(range(d // 2, d))
    assert syncs_before_last_backward(d, "lazy") == set()


@pytest.mark.parametrize("policy", ["lazy", "eager", "eager-opt"])
@pytest.mark.parametrize("pairs", [1, 2])
def test_one_sync_per_stage_held_over_all_its_replicas(policy: str, pairs: int) -> None:
    lowered = lower(schedules.build("chimera", workers=8, microbatches=8, pairs=pairs), sync=policy)
    for entries in lowered.lists:
        assert sum(1 for e in entries if isinstance(e, Action) and e.op is Op.S) == 2 * pairs
    assert all(len(holders) == 2 * pairs for holders in lowered.holders)


def test_eager_sync_hides_what_lazy_sync_shows() -> None:
    lazy, opt, eager = (run("chimera", 8, 8, sync_cost=3.0, policy=p).makespan_s for p in ("lazy", "eager-opt", "eager"))
    assert eager <= opt < lazy
    assert lazy == 36 + 2 * 3


@pytest.mark.parametrize(("options", "stages"), [({}, {5, 6, 7}), ({"pairs": 2}, {3, 4, 7}), ({"split": True}, set())])
def test_eager_opt_syncs_early_where_a_bubble_is_left(options: dict[str, object], stages: set[int]) -> None:
    """Above D/2 with one pair and whole backwards; elsewhere, or nowhere, with more pairs or split backwards."""
    early: set[int] = set()
    for entries in lower(schedules.build("chimera", workers=8, microbatches=8, **options), sync="eager-opt").lists:
        ops = [entry for entry in entries if isinstance(entry, Action)]
        last = max(i for i, action in enumerate(ops) if action.op in (Op.B, Op.W))
        early |= {action.stage for action in ops[:last] if action.op is Op.S}
    assert early == stages
