"""Zero bubble: the published rates from the published times, the formulas of h1 and h2, and what auto promises."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import Cluster, Link, StageCost, Timeline, check, even_costs, schedules, simulate
from tests.support.helpers import idle, peaks, run
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data"
CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Layers per worker (two more for the embeddings), one chunk each."""


def table(name: str) -> list[dict[str, str]]:
    with (DATA / f"zerobubble_{name}.csv").open() as file:
        return list(csv.DictReader(file))


ROWS = list(zip(table("table5_bubble_rates"), table("table6_profiled_times_ms"), strict=True))
SMALL = [row for row in ROWS if int(row[0]["stages"]) == 8]
LARGE = [row for row in ROWS if int(row[0]["stages"]) > 8]


def timeline(name: str, times: dict[str, str], **options: object) -> Timeline:
    """One of our orders at the profiled times, latency included."""
    d, n = int(times["stages"]), int(times["microbatches"])
    f, i, w, c = (float(times[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms"))
    cluster = Cluster(Link(latency_s=c))
    stages = schedules.build(name, workers=d, microbatches=n, **{k: v for k, v in options.items() if k == "chunks"}).stages
    costs = even_costs(stages=stages, workers=d, forward_s=f, backward_s=i + w, split=(i, w))
    schedule = schedules.build(name, workers=d, microbatches=n, costs=costs, cluster=cluster, **options)
    return simulate(schedule, costs, cluster)


def rates_hold(rates: dict[str, str], times: dict[str, str]) -> None:
    assert round(timeline("onef1b", times).bubble_ratio, 4) == float(rates["1F1B"])
    assert round(timeline("zero_bubble", times, variant="h1").bubble_ratio, 4) == float(rates["ZB-H1"])
    assert round(timeline("zero_bubble", times, variant="h2").span_bubble_ratio, 4) == float(rates["ZB-H2"])
    interleaved = timeline("interleaved", times, chunks=CHUNKS[rates["model"]])
    # The published interleaved rates leave one round of latency over all workers out: D hops less than the order really takes.
    hops = int(times["stages"]) * float(times["T_comm_ms"])
    assert round(1 - interleaved.busy_s(0) / (interleaved.makespan_s - hops), 4) == float(rates["1F1B-I"])


def rest_of(model: str) -> float:
    """What waits for W against a full activation, from the model's shape: 32 h of 34 h + 5 a s bytes a token."""
    shape = next(row for row in table("table3_models") if row["model"] == model)
    hidden, heads, sequence = (int(shape[key]) for key in ("hidden", "heads", "seq"))
    return 32 * hidden / (34 * hidden + 5 * heads * sequence)


@pytest.mark.parametrize(("rates", "times"), SMALL)
def test_published_rates(rates: dict[str, str], times: dict[str, str]) -> None:
    rates_hold(rates, times)


@pytest.mark.slow
@pytest.mark.parametrize(("rates", "times"), LARGE)
def test_published_rates_of_large_models(rates: dict[str, str], times: dict[str, str]) -> None:
    rates_hold(rates, times)


@pytest.mark.parametrize(("rates", "times"), SMALL)
def test_auto_with_twice_the_memory_is_not_worse_than_published(rates: dict[str, str], times: dict[str, str]) -> None:
    """In the paper's own count of memory, where I frees part of an activation."""
    d = int(times["stages"])
    found = timeline("zero_bubble", times, variant="auto", memory=2 * d, rest=rest_of(rates["model"]), span=True)
    assert round(found.span_bubble_ratio, 4) <= float(rates["ZB-2p"])


@pytest.mark.slow
@pytest.mark.parametrize(("rates", "times"), LARGE)
def test_auto_with_twice_the_memory_on_large_models(rates: dict[str, str], times: dict[str, str]) -> None:
    d = int(times["stages"])
    found = timeline("zero_bubble", times, variant="auto", memory=2 * d, rest=rest_of(rates["model"]), span=True)
    assert round(found.span_bubble_ratio, 4) <= float(rates["ZB-2p"])


@pytest.mark.parametrize("d", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("n", [8, 12, 24])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 4.0, 2.0)])
def test_h1_has_the_memory_of_1f1b_and_a_smaller_bubble(d: int, n: int, f: float, i: float, w: float) -> None:
    found = run("zero_bubble", d, n, f, i + w, input_share=i / (i + w), variant="h1")
    assert idle(found)[0] == pytest.approx((d - 1) * (f + i - w))
    assert max(peaks(found)) == d


@pytest.mark.parametrize("d", [2, 3, 4, 6])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 4.0, 3.0)])
def test_h2_has_no_bubble_within_a_span_for_equal_parts(d: int, f: float, i: float, w: float) -> None:
    n = 3 * d
    found = run("zero_bubble", d, n, f, i + w, input_share=i / (i + w), variant="h2")
    longest = max(spans[-1].end_s - spans[0].start_s for spans in found.compute)
    assert longest - n * (f + i + w) == pytest.approx((d - 1) * max(0.0, f + i - 2 * w))
    assert max(peaks(found)) == 2 * d - 1
    if f == i == w:
        assert found.makespan_s == run("zero_bubble", d, n, f, i + w, variant="h1").makespan_s


@pytest.mark.parametrize("variant", ["h1", "h2", "auto"])
@pytest.mark.parametrize(("d", "n"), [(1, 1), (1, 5), (4, 1), (4, 2), (8, 3), (5, 7)])
def test_few_microbatches_are_fine(variant: str, d: int, n: int) -> None:
    schedule = schedules.build("zero_bubble", workers=d, microbatches=n, variant=variant)
    assert check(schedule).ok


@settings(max_examples=40, deadline=None)
@given(
    d=st.integers(1, 6),
    n=st.integers(1, 14),
    extra=st.integers(0, 6),
    c=st.sampled_from([0.0, 0.1, 0.3]),
    data=st.data(),
)
def test_auto_is_never_worse_than_the_closed_forms_at_their_memory(
    d: int, n: int, extra: int, c: float, data: st.DataObject
) -> None:
    costs = [StageCost(*(data.draw(st.sampled_from([0.7, 1.0, 1.3])) for _ in range(3))) for _ in range(d)]
    cluster = Cluster(Link(c)) if c else None
    cap = d + extra

    def time(**options: object) -> float:
        schedule = schedules.build("zero_bubble", workers=d, microbatches=n, costs=costs, cluster=cluster, **options)
        found = simulate(schedule, costs, cluster)
        if options.get("memory"):
            assert max(peaks(found)) <= cap and check(schedule).ok
        return found.makespan_s

    auto = time(variant="auto", memory=cap)
    assert auto <= time(variant="h1") + 1e-9
    if cap >= 2 * d - 1:
        assert auto <= time(variant="h2") + 1e-9


def test_memory_belongs_to_auto() -> None:
    from meshwright import MeshwrightError

    with pytest.raises(MeshwrightError, match="memory needs variant=auto"):
        schedules.build("zero_bubble", workers=4, microbatches=4, memory=8)
    with pytest.raises(MeshwrightError, match="memory=0"):
        schedules.build("zero_bubble", workers=4, microbatches=4, variant="auto", memory=0)
