"""What the papers say of memory: peaks of activations, copies of parameters, and what recompute leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshwright import Action, Cluster, Link, Op, Recompute, Schedule, StageCost, Timeline, even_costs, lower, schedules, simulate
from meshwright.ir.action import Entry, actions
from tests.support.random_schedules import build, label, named


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 2), (4, 4), (4, 10), (6, 9)])
def test_peaks_of_plain_pipelines(workers: int, microbatches: int) -> None:
    """GPipe keeps all N; 1F1B the min of N and D - s; GEMS one."""
    costs = even_costs(stages=workers, workers=workers)
    for name, peaks in {
        "gpipe": [microbatches] * workers,
        "onef1b": [min(microbatches, workers - stage) for stage in range(workers)],
        "gems": [1] * workers,
    }.items():
        schedule = schedules.build(name, workers=workers, microbatches=microbatches)
        timeline = simulate(schedule, costs)
        assert [timeline.peak(worker) for worker in range(workers)] == peaks


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_parameter_copies(workers: int) -> None:
    """PipeDream D..1, 2BW two, Chimera and GEMS two, f pairs 2f; cyclic one copy of each stage, 1F1B of its own."""
    copies = {
        "pipedream": [float(workers - stage) for stage in range(workers)],
        "pipedream_2bw": [2.0] * workers if workers > 1 else [1.0],
        "cyclic": [float(workers)] * workers,
        "onef1b": [1.0] * workers,
        "interleaved": [1.0] * workers,
        "gpipe": [1.0] * workers,
    }
    if workers % 2 == 0:
        copies |= {"chimera": [2.0] * workers, "gems": [2.0] * workers, "dualpipe": [2.0] * workers}
    for name, wanted in copies.items():
        schedule = build(name, {}, workers=workers, steps=4)
        costs = even_costs(stages=schedule.stages, workers=workers)
        assert list(simulate(schedule, costs).parameter_copies) == wanted, name
    if workers == 4:
        schedule = build("chimera", {"pairs": 2}, workers=4)
        assert list(simulate(schedule, even_costs(stages=4, workers=4)).parameter_copies) == [4.0] * 4


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_parameter_copies_counted_again(name: str, options: dict[str, object]) -> None:
    """Versions alive after each entry of the list: made, and still read or the newest."""
    schedule = lower(build(name, options, steps=3))
    timeline = simulate(schedule, even_costs(stages=schedule.stages, workers=schedule.workers))
    for worker, entries in enumerate(schedule.lists):
        most = 0
        made = {(stage, 0) for _, stage in schedule.placement.held[worker]}
        last = last_reads(entries)
        replaced = {(a.stage, a.version) for entry in entries for a in actions(entry) if a.op is Op.U}
        for index, entry in enumerate(entries):
            made |= {(a.stage, a.version + 1) for a in actions(entry) if a.op is Op.U and a.stage < schedule.stages}
            alive = {key for key in made if key not in replaced or last[key] > index}
            most = max(most, len(alive))
        assert timeline.parameter_copies[worker] == pytest.approx(most * schedule.workers / schedule.stages)


def last_reads(entries: Sequence[Entry]) -> dict[tuple[int, int], int]:
    """For each (stage, version) the last place in a list that reads it."""
    ops = (Op.F, Op.R, Op.B, Op.I, Op.W, Op.U)
    return {(a.stage, a.version): index for index, entry in enumerate(entries) for a in actions(entry) if a.op in ops}


def test_cyclic_keeps_the_number_of_live_activations_constant() -> None:
    """Between fill and drain the workers together hold N (N + 1) / 2 stage activations at any time."""
    for workers in (2, 3, 4, 5):
        schedule = schedules.build("cyclic", workers=workers, microbatches=workers, steps=5)
        timeline = simulate(schedule, even_costs(stages=workers, workers=workers, forward_s=1.0, backward_s=1.0))
        begin, end = 2.0 * workers, timeline.makespan_s - 2.0 * workers
        slot = 1.0
        for step in range(round((end - begin) / slot)):
            time = begin + (step + 0.5) * slot
            alive = sum(level_at(timeline, worker, time) for worker in range(workers))
            assert alive == workers * (workers + 1) / 2, time


def level_at(timeline: Timeline, worker: int, time: float) -> float:
    """A worker's activations at a time."""
    return next((level.activations for level in reversed(timeline.memory[worker]) if level.time_s <= time), 0.0)


SIZES = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, recompute_s=1.0, activation_bytes=8.0, output_bytes=1.0)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_inline_recompute_has_one_working_set(share: float) -> None:
    """N inputs and N times what is not dropped; one microbatch whole while its backward runs."""
    plain = schedules.build("gpipe", workers=2, microbatches=4)
    schedule = replace(plain, recompute=(Recompute(share),) * 2)
    timeline = simulate(schedule, [replace(SIZES, output_bytes=0.0)] * 2)
    kept = (1 - share) * 8.0
    assert timeline.peak_bytes(0) == pytest.approx(4 * kept + share * 8.0)
    given = simulate(schedule, [SIZES] * 2)
    assert given.peak_bytes(1) == pytest.approx(4 * (1.0 + kept) + share * 8.0)
    assert timeline.peak(0) == 4, "dropped or not, four microbatches are alive"


@pytest.mark.parametrize(("op", "share"), [(op, share) for op in ("B", "I") for share in (0.25, 1.0)])
def test_one_microbatch_is_never_held_twice(op: str, share: float) -> None:
    """With recompute inside, whole or split backward: the input and one set of activations at most."""
    placement = schedules.build("gpipe", workers=1, microbatches=1).placement
    back = [Action(Op.B, 0, 0)] if op == "B" else [Action(Op.I, 0, 0), Action(Op.W, 0, 0)]
    schedule = Schedule("one", placement, 1, ((Action(Op.F, 0, 0), *back),), recompute=(Recompute(share),))
    timeline = simulate(schedule, [replace(SIZES, output_bytes=0.0)])
    assert timeline.peak_bytes(0) == pytest.approx(8.0)


def test_early_recompute_brings_activations_back_at_its_start() -> None:
    schedule = schedules.build("shifted", workers=2, microbatches=2, level="early")
    timeline = simulate(schedule, [replace(SIZES, output_bytes=0.0)] * 2, Cluster(Link(2.0)))
    first = next(span for span in timeline.spans if span.worker == 0 and str(span.entry) == "0R0")
    before = max(level.bytes for level in timeline.memory[0] if level.time_s < first.start_s)
    after = [level.bytes for level in timeline.memory[0] if level.time_s == first.start_s][-1]
    assert (before, after) == (0.0, 8.0)


def test_recompute_that_costs_time_is_inside_by_default() -> None:
    """Costs with recompute_s and a schedule that has not decided: the stage drops everything but its input."""
    schedule = schedules.build("onef1b", workers=3, microbatches=4)
    rows = [replace(SIZES, output_bytes=0.0)] * 3
    decided = replace(schedule, recompute=(Recompute(1.0),) * 3)
    assert simulate(schedule, rows).memory == simulate(decided, rows).memory
    assert simulate(schedule, rows).peak_bytes(0) == 8.0
