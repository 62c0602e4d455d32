"""The papers' closed forms, by name: what the simulator gives is what the formulas say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import MeshwrightError, Recompute, StageCost, schedules, simulate
from tests.support.helpers import idle, peaks, run

SIZES = [(d, n) for d in (1, 2, 3, 4, 8) for n in (1, 2, 4, 8, 16)]
RATIOS = [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


@pytest.mark.parametrize(("d", "n"), SIZES)
@pytest.mark.parametrize(("f", "b"), RATIOS)
def test_gpipe_and_1f1b_take_the_same_time_with_other_peaks(d: int, n: int, f: float, b: float) -> None:
    gpipe, onef1b = run("gpipe", d, n, f, b), run("onef1b", d, n, f, b)
    assert gpipe.makespan_s == pytest.approx((n + d - 1) * (f + b))
    assert onef1b.makespan_s == pytest.approx((n + d - 1) * (f + b))
    assert gpipe.bubble_ratio == pytest.approx((d - 1) / (n + d - 1))
    assert peaks(gpipe) == [n] * d
    assert peaks(onef1b) == [min(n, d - s) for s in range(d)]


@pytest.mark.parametrize("warmup", [1, 2, 4])
def test_deeper_warmup_costs_memory_and_no_time(warmup: int) -> None:
    timeline = run("onef1b", 4, 16, warmup=warmup)
    assert timeline.makespan_s == pytest.approx(19 * 3)
    assert peaks(timeline) == [min(16, warmup * (3 - s) + 1) for s in range(4)]


@pytest.mark.parametrize(
    ("d", "k", "v"), [(2, 1, 2), (2, 4, 3), (4, 1, 2), (4, 2, 2), (4, 4, 3), (8, 2, 4), (3, 3, 2), (1, 4, 2)]
)
@pytest.mark.parametrize(("f", "b"), RATIOS)
def test_interleaved_divides_the_bubble_by_its_chunks(d: int, k: int, v: int, f: float, b: float) -> None:
    timeline = run("interleaved", d, k * d, f, b, chunks=v)
    assert timeline.makespan_s == pytest.approx(k * d * (f + b) + (d - 1) * (f + b) / v)
    if k > 1:
        assert max(peaks(timeline)) == pytest.approx(d * (1 + (d - 1) / (d * v)))


@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_gems_holds_one_activation(d: int, n: int) -> None:
    timeline = run("gems", d, n)
    assert peaks(timeline) == [1.0] * d
    assert set(timeline.parameter_copies) == {2.0}
    if n % 2 == 0:
        assert timeline.makespan_s == pytest.approx(n / 2 * (4 * d + 2) + d - 1)


def test_gems_bubbles_of_the_paper_at_twice_the_forward() -> None:
    assert run("gems", 4, 4).bubble_ratio == pytest.approx(0.692, abs=5e-4)
    assert run("gems", 8, 8).bubble_ratio == pytest.approx(0.832, abs=5e-4)


@pytest.mark.parametrize("d", [1, 2, 4, 6])
def test_pipedream_keeps_up_to_d_versions_and_has_no_bubble(d: int) -> None:
    timeline = run("pipedream", d, d, steps=6)
    assert timeline.bubble_ratio == pytest.approx(0.0)
    assert list(timeline.parameter_copies) == [d - s for s in range(d)]
    assert peaks(timeline) == [d - s for s in range(d)]


@pytest.mark.parametrize(("d", "n"), [(2, 2), (4, 4), (4, 8), (3, 7)])
def test_two_buffered_weights_keep_two_versions(d: int, n: int) -> None:
    timeline = run("pipedream_2bw", d, n, steps=6)
    assert timeline.bubble_ratio == pytest.approx(0.0)
    assert list(timeline.parameter_copies) == [2.0] * d
    assert timeline.makespan_s == pytest.approx((6 * n + d - 1) * 3)


@pytest.mark.parametrize("d", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("w", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("f", "b"), RATIOS)
def test_hanayo_bubble_does_not_grow_with_microbatches(d: int, w: int, k: int, f: float, b: float) -> None:
    timeline = run("hanayo", d, k * d, f, b, waves=w)
    assert timeline.makespan_s == pytest.approx(k * d * (f + b) + (2 * d - 2) * max(f, b) / (2 * w))
    assert max(peaks(timeline)) <= d
    if (f, b) == (1.0, 2.0) and k == 1:
        assert timeline.bubble_ratio == pytest.approx((2 * d - 2) / (3 * d * w + 2 * d - 2))


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 15, 24])
def test_zbv_has_no_bubble_within_a_span(d: int, n: int) -> None:
    timeline = run("zbv", d, n, 2.0, 4.0)
    flush = max(4 * d + 2 * n - 1, 3 * d + 4 * n - 1, 6 * n + d - 1)
    assert timeline.makespan_s == pytest.approx(flush)
    assert max(peaks(timeline)) <= d
    assert set(timeline.parameter_copies) == {1.0}
    if n >= 2 * d - 1:
        assert timeline.span_bubble_ratio == pytest.approx(0.0)


@pytest.mark.parametrize("d", [2, 4, 6, 8])
@pytest.mark.parametrize(("forward", "weight", "overlap"), [(1.0, 1.0, 0.0), (1.0, 0.5, 0.0), (2.0, 1.0, 0.5), (3.0, 3.0, 1.0)])
def test_dualpipe_bubble_and_memory(d: int, forward: float, weight: float, overlap: float) -> None:
    backward = forward + weight
    for n in (2 * d, 3 * d):
        timeline = run("dualpipe", d, n, forward, backward, input_share=forward / backward, overlap=overlap)
        cell = forward + backward - overlap * min(forward, backward)
        middle = idle(timeline)[d // 2]
        assert middle == pytest.approx((d / 2 - 1) * (cell + backward - 3 * weight))
        assert max(peaks(timeline)) == d + 1
        assert set(timeline.parameter_copies) == {2.0}


@pytest.mark.parametrize("d", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [8, 12])
def test_dualpipev_is_dualpipe_folded(d: int, n: int) -> None:
    timeline = run("dualpipev", d, n, 2.0, 4.0)
    assert idle(timeline)[d - 1] == pytest.approx((d - 1) * (3 + 2 - 3 * 1))
    assert max(peaks(timeline)) == pytest.approx((2 * d + 1) / 2)
    assert set(timeline.parameter_copies) == {1.0}


def test_dualpipe_cells_are_single_entries() -> None:
    lists = schedules.build("dualpipe", workers=4, microbatches=8).lists
    assert all(any(str(entry).startswith("[") for entry in entries) for entries in lists)


SHIFTED = [
    (p, m, f, b, r) for p in range(2, 9) for m in (4, 8, 13) if m >= p for f, b, r in [(1, 2, 1), (1, 1, 1), (2, 3, 1), (1, 3, 1)]
]


@pytest.mark.parametrize(("p", "m", "f", "b", "r"), SHIFTED)
def test_shifted_critical_path(p: int, m: int, f: float, b: float, r: float) -> None:
    work = m * (f + r + b)
    inline = run("onef1b", p, m, f, b, recompute=r).makespan_s
    early, last, full = (run("shifted", p, m, f, b, recompute=r, level=level).makespan_s for level in ("early", "last", "full"))
    assert inline == pytest.approx((p - 1) * f + work + (p - 1) * (r + b))
    assert early == pytest.approx((p - 1) * f + work + (p - 1) * b)
    assert last == pytest.approx((p - 2) * f + work + (p - 2) * b + max(0, b - r))
    assert full == pytest.approx((p - 2) * f + work + (p - 2) * b + max(0, b - f - r, b - 2 * r))


def test_shifted_by_the_paper_numbers() -> None:
    def total(level: str) -> float:
        return run("shifted", 4, 8, recompute=1.0, level=level).makespan_s

    assert [total(level) for level in ("early", "last", "full")] == [41, 39, 38]
    assert run("onef1b", 4, 8, recompute=1.0).makespan_s == 44
    assert peaks(run("shifted", 4, 8, recompute=1.0)) == [4, 3, 3, 1]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("level", ["early", "last", "full"])
def test_shifted_falls_back_for_few_microbatches(p: int, m: int, level: str) -> None:
    plain = run("onef1b", p, m, recompute=1.0).makespan_s
    assert run("shifted", p, m, recompute=1.0, level=level).makespan_s <= plain


@pytest.mark.parametrize(
    ("name", "workers", "microbatches", "options", "said"),
    [
        ("chimera", 3, 4, {}, "even number of workers, got 3"),
        ("chimera", 8, 8, {"pairs": 3}, "pairs=3 does not divide"),
        ("chimera", 4, 6, {}, "got 6"),
        ("chimera", 4, 3, {}, "got 3"),
        ("chimera", 4, 4, {"half_forward": True}, "mode=halving"),
        ("chimera", 4, 4, {"split": True, "mode": "doubling"}, "cannot be combined"),
        ("chimera", 4, 4, {"speed": 9}, "no option 'speed'"),
        ("chimera", 4, 4, {"mode": "tripling"}, "cannot be 'tripling'"),
        ("onef1b", 4, 4, {"warmup": 3}, "cannot be 3"),
        ("onef1b", 0, 4, {}, "workers must be a whole number"),
        ("onef1b", 4, -1, {}, "microbatches must be a whole number"),
        ("interleaved", 4, 6, {}, "groups of 4 microbatches"),
        ("interleaved", 4, 4, {"chunks": 0}, "at least one chunk"),
        ("hanayo", 4, 4, {"waves": 0}, "at least one wave"),
        ("dualpipe", 3, 4, {}, "even number of workers"),
        ("dualpipe", 4, 5, {}, "half of the microbatches"),
        ("pipedream_2bw", 8, 4, {}, "at least 7 microbatches"),
        ("cyclic", 4, 5, {}, "one microbatch per worker"),
        ("cyclic", 4, 4, {"chunks": 5}, "1 to 4 stages"),
        ("cyclic", 4, 4, {"margin": 9}, "margin must be 0 to 4"),
        ("cyclic", 4, 4, {"rule": "v1", "margin": 1}, "margin needs rule=v2"),
        ("nothing", 4, 4, {}, "no schedule 'nothing'"),
    ],
)
def test_refusals_name_the_numbers_and_a_way_out(
    name: str, workers: int, microbatches: int, options: dict[str, object], said: str
) -> None:
    with pytest.raises(MeshwrightError) as caught:
        schedules.build(name, workers=workers, microbatches=microbatches, **options)
    assert said in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(("kept", "total"), [(0.0, 38.0), (0.1, 37.15), (0.25, 35.875), (0.4, 34.8), (0.5, 34.5)])
def test_stage_aware_shares_on_top_of_the_shifted_schedule(kept: float, total: float) -> None:
    """The first stage keeps a share, later ones what their fewer microbatches in flight allow: p = 4, m = 8."""
    schedule = schedules.build("shifted", workers=4, microbatches=8)
    shares = [kept * 3 / (3 - s) for s in range(3)]
    shares[2] = shares[1]
    recompute = (*tuple(Recompute(1 - min(1.0, share), early=True) for share in shares), Recompute(0.0))
    costs = [StageCost(1.0, 1.0, 1.0, recompute_s=1.0)] * 4
    assert simulate(replace(schedule, recompute=recompute), costs).makespan_s == pytest.approx(total)
