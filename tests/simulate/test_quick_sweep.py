"""The quick sweep against the plain engine: every schedule by name, random schedules, random costs and links, syncs included."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from meshwright import Cluster, Duplex, Link, Schedule, StageCost, schedules, simulate  # noqa: E402
from meshwright.errors import MeshwrightError  # noqa: E402
from meshwright.ir.schedule import Sharding  # noqa: E402
from meshwright.simulate import quick_kernels  # noqa: E402
from meshwright.simulate.quick_sweep import QuickProgram  # noqa: E402
from meshwright.simulate.simulator import proved_with_peaks  # noqa: E402
from tests.support.random_schedules import random_case  # noqa: E402

CLOSE = 1e-9
NAMED = [(name, options) for name in schedules.names() for options in schedules.compared(name)]
SLOW = {"pipedream", "pipedream_2bw", "cyclic"}
"""Without a flush: the engine runs these."""


def costs_of(rng: Random, schedule: Schedule) -> list[StageCost]:
    recompute = schedule.recompute is None and rng.random() < 0.3

    def bytes_of() -> float:
        return rng.choice((0.0, rng.uniform(0.1, 1.0), rng.uniform(1.0, 10.0)))

    return [
        StageCost(
            *(rng.choice((1.0, rng.uniform(0.5, 1.5))) for _ in range(3)),
            recompute_s=rng.uniform(0.1, 1.0) if recompute and rng.random() < 0.7 else 0.0,
            sync_s=rng.choice((0.0, rng.uniform(0.0, 9.0))),
            gather_s=rng.uniform(0.0, 3.0),
            output_bytes=bytes_of(),
            gradient_bytes=bytes_of(),
        )
        for _ in range(schedule.stages)
    ]


def cluster_of(rng: Random, workers: int) -> Cluster | None:
    def link() -> Link:
        return Link(rng.choice((0.0, 0.05, 2.0)), rng.choice((0.5, 5.0, float("inf"))))

    if rng.random() < 0.2:
        return None
    pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b and rng.random() < 0.3]
    return Cluster(link(), {pair: link() for pair in pairs}, rng.choice(list(Duplex)))


def agree(schedule: Schedule, costs: list[StageCost], cluster: Cluster | None, sync: str, overlap: float = 0.0) -> bool:
    """True if the quick path ran it, and gave the time of the engine."""
    program = QuickProgram(schedule, sync=sync)
    found = program.times(costs, cluster, overlap=overlap)
    timeline = simulate(schedule, costs, cluster, sync=sync, overlap=overlap)
    assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=CLOSE, abs=0)
    ends = [spans[-1].end_s if spans else 0.0 for spans in timeline.compute]
    assert found.computed_s == pytest.approx(ends, rel=CLOSE, abs=0)
    return program.quick


def agree_as_run(schedule: Schedule, costs: list[StageCost], cluster: Cluster | None) -> float:
    """The same for lists that are lowered without links, as a run has them; returns how many times as long a step takes."""
    found = QuickProgram(schedule, as_run=True).times(costs, cluster)
    timeline, _ = proved_with_peaks(schedule, costs, cluster)
    assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=CLOSE, abs=0)
    ends = [spans[-1].end_s if spans else 0.0 for spans in timeline.compute]
    assert found.computed_s == pytest.approx(ends, rel=CLOSE, abs=0)
    return found.makespan_s / QuickProgram(schedule).makespan_s(costs, cluster)


def built(rng: Random, name: str, options: dict[str, object]) -> Schedule | None:
    try:
        return schedules.build(name, workers=rng.choice((1, 2, 4, 8)), microbatches=rng.choice((4, 8, 16)), **options)
    except MeshwrightError:
        return None


@pytest.mark.parametrize(("name", "options"), NAMED, ids=str)
def test_every_schedule_by_name(name: str, options: dict[str, object]) -> None:
    """With stages that divide state, or gradients too; lazy and eager; cells that hide something."""
    seen = 0
    for seed in range(16):
        rng = Random(seed)
        schedule = built(rng, name, options)
        if schedule is not None:
            if schedule.flush:
                schedule = replace(schedule, sharding=rng.choice((Sharding.NONE, Sharding.STATE, Sharding.GRADIENTS)))
            costs, cluster = costs_of(rng, schedule), cluster_of(rng, schedule.workers)
            assert agree(schedule, costs, cluster, rng.choice(("eager", "lazy")), rng.choice((0.0, 0.5))) != (name in SLOW)
            seen += 1
    assert seen >= 3 or name in SLOW


@pytest.mark.parametrize(("name", "options"), NAMED, ids=str)
def test_every_schedule_as_it_runs(name: str, options: dict[str, object]) -> None:
    """Messages are placed without links, but take their time. The engine that a planner proves with does the same."""
    ratios = []
    for seed in range(16):
        rng = Random(seed)
        if (schedule := built(rng, name, options)) is not None and schedule.flush:
            schedule = replace(schedule, sharding=rng.choice((Sharding.NONE, Sharding.STATE, Sharding.GRADIENTS)))
            ratios.append(agree_as_run(schedule, costs_of(rng, schedule), cluster_of(rng, schedule.workers)))
    assert len(ratios) >= 3 or name in SLOW


def test_places_of_messages_depend_on_links() -> None:
    """Otherwise the test above could not tell the two apart: a step is shorter or longer if a run places its messages."""
    schedule = schedules.build("listed", workers=4, microbatches=8)
    ratios = [agree_as_run(schedule, costs_of(Random(seed), schedule), cluster_of(Random(seed), 4)) for seed in range(30)]
    assert min(ratios) < 0.999 and max(ratios) > 1.001


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_random_schedules(seed: int, wide: bool) -> None:
    """Any placement, ties, recompute, halves, cells, turns and teams."""
    rng = Random(seed)
    case = random_case(rng, wide=wide)
    agree(case.schedule, list(case.costs), case.cluster, case.sync, case.overlap)


def test_most_random_narrow_schedules_are_quick() -> None:
    found = [QuickProgram(random_case(Random(seed), wide=False).schedule).quick for seed in range(60)]
    assert sum(found) >= 10


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loops as plain Python."""
    for name in ("order", "messages", "times"):
        kernel = getattr(quick_kernels, name)
        monkeypatch.setattr(quick_kernels, name, getattr(kernel, "py_func", kernel))
    rng = Random(5)
    for name, options in (("chimera", {}), ("listed", {}), ("zbv", {}), ("dualpipe", {})):
        schedule = schedules.build(name, workers=4, microbatches=8, **options)
        assert agree(schedule, costs_of(rng, schedule), cluster_of(rng, 4), "eager")


def test_lists_that_block_are_refused() -> None:
    schedule = schedules.build("onef1b", workers=2, microbatches=2)
    blocked = schedule.with_lists((tuple(reversed(schedule.lists[0])), schedule.lists[1]))
    with pytest.raises(MeshwrightError):
        QuickProgram(blocked).makespan_s([StageCost(1.0, 1.0, 1.0)] * 2)


def test_long_messages_wait_for_their_turn() -> None:
    """A receiver holds at most two unread messages: without that rule these steps would be shorter."""
    schedule = schedules.build("gpipe", workers=2, microbatches=6)
    costs = [StageCost(0.1, 1.0, 1.0, output_bytes=3.0, gradient_bytes=1.0), StageCost(2.0, 1.0, 1.0)]
    assert agree(schedule, costs, Cluster(Link(1.0, 1.0)), "eager")
