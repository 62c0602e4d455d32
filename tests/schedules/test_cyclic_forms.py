"""Cyclic data parallelism with workers for each stage: where microbatches run, time, live activations, copies and messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from meshwright import (
    MeshwrightError,
    Parallel,
    Schedule,
    StageCost,
    Timeline,
    check,
    even_costs,
    forward_only,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
)
from meshwright.ir.action import Action, Kind, Op, Transfer, walk
from meshwright.ir.analysis.effects import rings
from meshwright.ir.analysis.held_values import final, late_units
from meshwright.ir.placement import Placement
from meshwright.runtime.mesh import Mesh, channels
from meshwright.schedules._orders.cyclic_forms import placed
from meshwright.train.data.own_microbatches import microbatches_of
from meshwright.train.setup.build_schedule import lists_for

FORMS = ["mp", "pp"]
OPTIONS: list[dict[str, Any]] = [{"rule": "v1"}, {}, {"margin": 1}]


def built(form: str, stages: int, microbatches: int = 0, **more: Any) -> Schedule:
    workers = stages if form == "pp" else stages * (stages + 1) // 2
    return schedules.build("cyclic", workers=workers, microbatches=microbatches or stages, form=form, **more)


def timed(schedule: Schedule) -> Timeline:
    return simulate(schedule, even_costs(stages=schedule.stages, workers=schedule.stages, forward_s=1.0, backward_s=1.0))


def live(timeline: Timeline, time: int) -> list[float]:
    """The activations that each worker holds at a time, as shares of what workers compute of a microbatch on average."""
    return [next((x.activations for x in reversed(levels) if x.time_s <= time), 0.0) for levels in timeline.memory]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_all_forms_read_what_the_replicated_form_reads(form: str, n: int, options: dict[str, Any]) -> None:
    def read(schedule: Schedule) -> set[Action]:
        return {action for entries in schedule.lists for action in walk(entries) if action.op in (Op.F, Op.B)}

    for first in (0, 1):
        found = built(form, n, steps=3, first=first, **options)
        assert read(found) == read(schedules.build("cyclic", workers=n, microbatches=n, steps=3, first=first, **options))
        lowered = lower(found)
        assert check(lowered).ok
        assert schedule_from_json(schedule_to_json(lowered)) == lowered


@pytest.mark.parametrize(("n", "microbatches"), [(3, 3), (3, 4), (4, 4)])
def test_segments_of_all_lengths_use_the_channels_of_the_longest(n: int, microbatches: int) -> None:
    for options in ({}, {"margin": 1, "stagger": "starts"}):
        found = {
            steps: lower(replace(built("mp", n, microbatches, steps=steps, first=1, **options), ties=((0, n - 1),)))
            for steps in (16, 1, 2, 3, 5)
        }
        mesh = Mesh(n * (n + 1) // 2, 1, 0)
        opened = set(channels(mesh, found[16]))
        assert all(set(channels(mesh, segment)) <= opened for segment in found.values())


def test_workers_of_a_stage_take_microbatches_in_turn() -> None:
    schedule = built("mp", 3, steps=2)
    assert schedule.placement.held == (((0, 0),),) * 3 + (((0, 1),),) * 2 + (((0, 2),),)
    runs = [[action.mb for action in walk(entries) if action.op is Op.F] for entries in schedule.lists]
    assert runs == [[0, 3], [1, 4], [2, 5], [0, 2, 4], [1, 3, 5], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "microbatches"), [(2, 2), (3, 3), (4, 4), (6, 6), (3, 4), (2, 5)])
def test_time_and_live_activations(form: str, n: int, microbatches: int, options: dict[str, Any]) -> None:
    rounds = 8 if n < 6 else 3
    timeline = timed(built(form, n, microbatches, steps=rounds, **options))
    assert timeline.makespan_s == 2 * microbatches * rounds + 2 * (n - 1)
    for spans in timeline.compute:
        for span in spans:
            assert isinstance(span.entry, Action)
            at = 2 * span.entry.mb
            assert span.start_s == at + (span.entry.stage if span.entry.op is Op.F else 2 * n - 1 - span.entry.stage)
    stage = timeline.workers / n  # the activations of one stage, in shares
    held = [n - s for s in range(n)] if form == "pp" else [1] * (n * (n + 1) // 2)
    for time in range(2 * (n - 1), 2 * microbatches * rounds):
        assert sum(live(timeline, time)) == stage * n * (n + 1) / 2
    assert [max(level.activations for level in levels) for levels in timeline.memory] == [stage * count for count in held]
    assert max(sum(live(timeline, time)) for time in range(int(timeline.makespan_s))) == stage * n * (n + 1) / 2


def test_three_stages_on_six_workers_take_52_steps_in_eight_rounds() -> None:
    """If a sum went along the first microbatches of workers, each round would wait for the last worker twice."""
    assert timed(built("mp", 3, steps=8)).makespan_s == 52
    assert timed(built("mp", 3, steps=8, stagger="starts")).makespan_s == 52
    ring = rings(built("mp", 3, steps=2))
    assert ring[1, 0] == (4, 3) and ring[1, 1] == (3, 4) and ring[0, 0] == (0, 1, 2) and ring[2, 0] == (5,)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_parameter_copies(n: int) -> None:
    """A worker of the model-parallel form has one version; a stage of the pipeline has two if it reads both."""
    assert set(timed(built("mp", n, steps=4)).parameter_copies) == {(n + 1) / 2}  # one stage of n, on n (n + 1) / 2 workers
    assert timed(built("pp", n, steps=4)).parameter_copies == (2.0,) * (n - 1) + (1.0,)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_messages_of_a_round(n: int, options: dict[str, Any]) -> None:
    """Activations and gradients cross n - 1 boundaries; the sum of a stage with k workers goes along k - 1 hops twice."""
    for form in FORMS:
        found: Counter[Kind] = Counter()
        for rounds, sign in ((6, 1), (5, -1)):
            for entries in lower(built(form, n, steps=rounds, stagger="starts", **options)).lists:
                for entry in entries:
                    if isinstance(entry, Transfer) and entry.sends:
                        found[entry.value.kind] += sign
        sums = n * (n - 1) // 2 if form == "mp" else 0
        assert found[Kind.ACT] == found[Kind.GRAD] == n * (n - 1)
        assert found[Kind.PARTIAL] == found[Kind.SUM] == sums and not found[Kind.TURN]


def test_a_worker_sends_at_most_one_sum_per_time_step() -> None:
    sent: Counter[tuple[int, int]] = Counter()
    for span in timed(built("mp", 4, steps=6)).spans:
        if isinstance(span.entry, Transfer) and span.entry.sends and span.entry.value.kind in (Kind.SUM, Kind.PARTIAL):
            sent[span.worker, round(span.start_s)] += 1
    assert max(count for (_, time), count in sent.items() if time < 8 * 6) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_ties_go_from_worker_to_worker_too(form: str, n: int) -> None:
    for options in OPTIONS:
        for first in (0, 1):
            tied = replace(built(form, n, steps=4, first=first, **options), ties=((0, n - 1),))
            assert timed(tied).makespan_s == 2 * n * 4 + 2 * (n - 1)
            lowered = lower(tied)
            assert check(lowered).ok and lowered.ring
            assert timed(lowered).makespan_s <= 2 * n * 4 + 2 * (n - 1) + 2  # messages are placed without costs here


@pytest.mark.parametrize("form", FORMS)
def test_lists_that_continue_a_run_keep_both_versions_where_they_are_read_late(form: str) -> None:
    for n in (2, 3, 4):
        for options in OPTIONS:
            schedule = built(form, n, steps=3, first=1, **options)
            for worker, entries in enumerate(schedule.lists):
                (stage,) = {stage for _, stage in schedule.placement.held[worker]}
                late = any(action.op is Op.F and action.version == 0 for action in walk(entries))
                assert late_units(schedule, worker) == ((stage,) if late else ())
                ends = {value.version for value in final(schedule, worker) if value.kind is Kind.PARAM}
                assert ends == ({3, 4} if late else {4})


@pytest.mark.parametrize("form", FORMS)
def test_unequal_stages_have_no_turns(form: str) -> None:
    costs = [StageCost(4.0 if stage == 1 else 1.0, 4.0 if stage == 1 else 1.0) for stage in range(4)]
    schedule = built(form, 4, steps=6, costs=costs)
    assert check(schedule).ok and not schedule.turns
    # the slowest stage is always in use: by its worker, or by microbatches that wait for their backwards on its three workers
    busy = 8 * 24 if form == "pp" else (4 + 1 + 1 + 1 + 1 + 4) * 24 / 3
    assert busy <= simulate(schedule, costs).makespan_s <= busy + 8


@pytest.mark.parametrize("n", [2, 3, 4])
def test_evaluation_runs_where_training_has_placed_the_stages(n: int) -> None:
    for form in FORMS:
        for first in (0, 1):
            schedule = built(form, n, steps=1, first=first)
            forwards = lower(forward_only(schedule))
            assert check(forwards).ok and forwards.placement.held == schedule.placement.held


def test_a_rank_loads_the_microbatches_that_it_may_run() -> None:
    loads = [microbatches_of(built("mp", 4, steps=1), worker) for worker in range(10)]
    every = (0, 1, 2, 3)
    assert loads == [(0,), (1,), (2,), (3,), every, every, every, (0, 2), (1, 3), every]
    assert [microbatches_of(built("pp", 3), worker) for worker in range(3)] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("n", [2, 3, 4])
def test_one_device_holds_half_of_the_activations(n: int) -> None:
    """All stages on one worker, N microbatches at once: (N + 1) / 2 of a microbatch, where lockstep holds N."""
    replicated = schedules.build("cyclic", workers=n, microbatches=n, steps=4)
    version = {(a.mb, a.stage): a.version for entries in replicated.lists for a in walk(entries) if a.op is Op.F}
    one = placed(
        Placement.of(lambda _, stage: 0, stages=n), microbatches=n, rounds=range(4), version=lambda mb, s: version[mb, s]
    )
    assert check(one).ok
    timeline = simulate(one, even_costs(stages=n, workers=1, forward_s=1.0, backward_s=1.0))
    assert max(level.activations for level in timeline.memory[0]) == (n + 1) / 2
    assert 1 < max(timeline.parameter_copies) <= 2


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"form": "mp", "workers": 5, "microbatches": 3}, r"form=mp has K \(K \+ 1\) / 2 workers for K stages, got 5 workers"),
        ({"form": "mp", "workers": 6, "microbatches": 3, "chunks": 2}, "form=mp has 3 stages on 6 workers, got chunks=2"),
        ({"form": "pp", "workers": 3, "microbatches": 3, "chunks": 2}, "form=pp has 3 stages on 3 workers, got chunks=2"),
        ({"form": "pp", "workers": 3, "microbatches": 2}, "form=pp needs at least one microbatch per stage: 3 stages, got 2"),
        ({"form": "pp", "workers": 3, "microbatches": 3, "margin": 4}, "margin must be 0 to 3, got 4"),
        ({"form": "zp", "workers": 3, "microbatches": 3}, "option form cannot be 'zp'"),
    ],
)
def test_sizes_that_a_form_cannot_have(given: dict[str, Any], what: str) -> None:
    with pytest.raises(MeshwrightError, match=what):
        schedules.build("cyclic", **given)


def test_plans_say_how_many_ranks_they_use() -> None:
    assert Parallel(dp=4, dp_mode="cyclic-mp").processes == 10
    assert Parallel(dp=4, dp_mode="cyclic-pp").processes == 4
    assert Parallel(dp=4, dp_mode="cyclic-mp", options={"chunks": 2}).processes == 3
    assert Parallel(dp=4, dp_mode="cyclic-pp", options={"chunks": "2"}).processes == 2
    for mode in ("cyclic-mp", "cyclic-pp"):
        schedule = lists_for(Parallel(dp=4, dp_mode=mode, options={"chunks": 3}), steps=2)
        assert (schedule.stages, schedule.microbatches, schedule.steps) == (3, 4, 2)
    with pytest.raises(MeshwrightError, match="option form='pp' and dp_mode=\"cyclic\" cannot be combined"):
        Parallel(dp=4, dp_mode="cyclic", options={"form": "pp"})
    with pytest.raises(MeshwrightError, match="at least one microbatch per stage: 3 stages, got 2 microbatches"):
        lists_for(Parallel(dp=2, dp_mode="cyclic-pp", options={"chunks": 3}))
