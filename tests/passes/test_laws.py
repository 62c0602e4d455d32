"""Every law over every schedule, size and option: what a file under `schedules/` builds can be proved, lowered and repeated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from meshwright import (
    Cluster,
    Link,
    MeshwrightError,
    Schedule,
    StageCost,
    Timeline,
    check,
    even_costs,
    lower,
    schedules,
    simulate,
)
from meshwright.ir.action import Action, Kind, Op, Transfer, Value
from meshwright.passes.recompute import Mode
from tests.support.cases import Case, cases, large

NAMES = schedules.names()
POLICIES = ("lazy", "eager", "eager-opt", "ring")


def proved(schedule: Schedule, case: Case) -> None:
    result = check(schedule)
    assert result.ok, f"{case}\n{result}"
    # One that orders its channels itself has messages wait where it says, at most as many as a stage has in flight.
    most = max(result.peak_activations) if schedule.channels else 2
    assert result.receive_depth <= most, f"{case}: {result.receive_depth} receives wait unread on a channel"


def all_hold(case: Case) -> None:
    """Laws of one case: as built, as lowered under every policy, as simulated, over several steps."""
    schedule = case.build()
    proved(schedule, case)
    for policy in POLICIES:
        lowered = lower(schedule, sync=policy)
        proved(lowered, case)
        assert lower(lowered) is lowered
        complete(lowered, case)
    costs = even_costs(stages=schedule.stages, workers=schedule.workers)
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s >= timeline.lower_bound_s - 1e-9
    assert [timeline.peak(w) for w in range(schedule.workers)] == pytest.approx(
        [p * schedule.workers / schedule.stages / schedule.parts for p in check(schedule).peak_activations]
    )
    slow = simulate(schedule, costs, Cluster(Link(0.25)))
    assert slow.makespan_s >= timeline.makespan_s - 1e-9


def complete(lowered: Schedule, case: Case) -> None:
    """As many sends as receives; every unit synced on every worker that runs it and updated on every holder in every round."""
    sends = [e for entries in lowered.lists for e in entries if isinstance(e, Transfer)]
    assert sum(e.sends for e in sends) * 2 == len(sends)
    for op in (Op.S, Op.U):
        found = sum(1 for entries in lowered.lists for e in entries if isinstance(e, Action) and e.op is op)
        all_of_them = lowered.steps * sum(map(len, lowered.runners if op is Op.S else lowered.holders))
        assert found == all_of_them or (op is Op.S and lowered.ring and found <= all_of_them), f"{case}: {op}"


@pytest.mark.parametrize("name", NAMES)
def test_all_laws_hold(name: str) -> None:
    found = list(cases((1, 2, 4, 5), (1, 4, 8), names=[name]))
    assert found
    for case in found:
        all_hold(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_laws_hold_at_many_sizes(name: str) -> None:
    for case in large():
        if case.name == name:
            all_hold(case)


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_steps(name: str) -> None:
    for case in cases((2, 4), (4,), names=[name], every_option=False):
        for steps in (1, 2, 3, 5):
            schedule = case.build(steps=steps)
            rounds = steps if schedule.microbatches == case.microbatches else steps * case.microbatches
            assert schedule.steps == rounds, case
            proved(schedule, case)
            if schedule.flush:
                costs = even_costs(stages=schedule.stages, workers=schedule.workers)
                one = simulate(case.build(steps=1), costs).makespan_s
                assert simulate(schedule, costs).makespan_s == pytest.approx(steps * one)


ENDLESS = [name for name in NAMES if not schedules.build(name, workers=2, microbatches=2).flush]
EXACT = StageCost(1.0, 0.75, 1.25, activation_bytes=1.0, output_bytes=1.0, gradient_bytes=2.0, parameter_bytes=4.0)
"""Sums of these have no rounding, so that equal runs have equal times."""


def lowered_and_longer(schedule: Schedule, more: int, **given: Any) -> tuple[Schedule, Schedule]:
    """A lowered schedule whose period runs `more` times, and the schedule with so many periods more, lowered as a whole."""
    lowered = lower(schedule, **given)
    assert bool(lowered.period) == bool(schedule.period), "the period is found again in the lowered lists"
    return lowered.repeated(more), lower(schedule.repeated(schedule.repeats + more), **given)


def same_work(one: Schedule, two: Schedule) -> None:
    """One verdict; every worker does the same in the same order, and every channel carries the same in the same order."""
    assert check(one).ok and check(one) == check(two)
    for a, b in zip(one.lists, two.lists, strict=True):
        assert [e for e in a if not isinstance(e, Transfer)] == [e for e in b if not isinstance(e, Transfer)]
    assert channels(one) == channels(two)


def channels(schedule: Schedule) -> dict[tuple[int, bool, int, Kind], list[Value]]:
    """What crosses every channel, in order, at both ends."""
    found: dict[tuple[int, bool, int, Kind], list[Value]] = defaultdict(list)
    for worker, entries in enumerate(schedule.lists):
        for e in entries:
            if isinstance(e, Transfer):
                found[worker, e.sends, e.peer, e.value.kind].append(e.value)
    return found


def same_times(one: Timeline, two: Timeline) -> None:
    """Every entry of every worker at its time, the same levels of memory at every time, the same peaks."""
    assert (set(one.spans), len(one.spans)) == (set(two.spans), len(two.spans))
    for a, b in zip(one.memory, two.memory, strict=True):
        assert {level.time_s: level for level in a} == {level.time_s: level for level in b}
    assert all(one.peak(w) == two.peak(w) and one.peak_bytes(w) == two.peak_bytes(w) for w in range(one.workers))
    assert (one.parameter_copies, one.lower_bound_s) == (two.parameter_copies, two.lower_bound_s)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ENDLESS)
def test_training_of_any_length_runs_from_one_lowered_period(name: str, workers: int) -> None:
    for steps in (1, 2, 3, 6):
        schedule = schedules.build(name, workers=workers, microbatches=workers, steps=steps)
        for more in (0, 1, 2, 5) if schedule.period else ():
            longer, fresh = lowered_and_longer(schedule, more)
            same_work(longer, fresh)
            costs = [EXACT] * schedule.stages
            same_times(simulate(longer, costs), simulate(fresh, costs))
            # Rounds of pipedream take turns: a message stands before what ends on another worker in one, behind it in the next.
            assert longer.lists == fresh.lists or name == "pipedream"


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ENDLESS)
def test_training_of_any_length_runs_from_one_period_lowered_for_its_links(name: str, workers: int) -> None:
    cluster = Cluster(Link(0.25, 8.0))
    for steps in (2, 3, 6):
        schedule = schedules.build(name, workers=workers, microbatches=workers, steps=steps)
        costs = [EXACT] * schedule.stages
        for more in (0, 1, 2, 5) if schedule.period else ():
            longer, fresh = lowered_and_longer(schedule, more, costs=costs, cluster=cluster)
            same_work(longer, fresh)
            same_times(simulate(longer, costs, cluster), simulate(fresh, costs, cluster))
            assert longer.lists == fresh.lists or name == "pipedream"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [Mode.INLINE, Mode.EARLY])
def test_every_schedule_can_recompute(name: str, mode: Mode) -> None:
    for case in cases((2, 4), (4,), names=[name], every_option=False):
        schedule = case.build()
        if schedule.recompute is None:
            proved(lower(schedule, recompute=mode), case)
            continue
        with pytest.raises(MeshwrightError, match="sets its recompute itself"):
            lower(schedule, recompute=mode)


@pytest.mark.parametrize("name", NAMES)
def test_ties_between_first_and_last_stage(name: str) -> None:
    for case in cases((2, 4), (4,), names=[name], every_option=False):
        plain = case.build()
        if plain.stages < 2:
            continue
        tied = replace(plain, ties=((0, plain.stages - 1),))
        for policy in POLICIES:
            lowered = lower(tied, sync=policy)
            proved(lowered, case)
            both = {w for copy in tied.placement.teams for s in (0, -1) for team in copy[s] for w in team}
            assert set(lowered.holders[tied.stages]) == both


def test_chimera_needs_no_extra_group_for_tied_embeddings() -> None:
    tied = replace(schedules.build("chimera", workers=4, microbatches=4), ties=((0, 3),))
    assert tied.holders[4] == tied.holders[0] == tied.holders[3] == (0, 3)


def test_a_period_that_does_not_run_yet_is_proved_too() -> None:
    lowered = lower(schedules.build("pipedream", workers=3, microbatches=3, steps=4))
    assert lowered.repeats == 0 and lowered.period and check(lowered).ok
    for worker, entries in enumerate(lowered.period):
        for index in range(len(entries)):
            cut = tuple(e[:index] + e[index + 1 :] if w == worker else e for w, e in enumerate(lowered.period))
            assert not check(replace(lowered, period=cut)).ok, entries[index]


def test_what_is_no_schedule_gets_a_verdict() -> None:
    assert not check(None).ok and not check("onef1b").ok  # type: ignore[arg-type]
