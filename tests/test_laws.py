"""Every law over every schedule, size and option: what a file under `schedules/` builds can be proved, lowered and repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import Cluster, Link, MeshwrightError, Schedule, check, even_costs, lower, schedules, simulate
from meshwright.ir.action import Action, Op, Transfer
from meshwright.passes.recompute import Mode
from tests.cases import Case, cases, large

NAMES = schedules.names()
POLICIES = ("lazy", "eager", "eager-opt", "ring")


def proved(schedule: Schedule, case: Case) -> None:
    result = check(schedule)
    assert result.ok, f"{case}\n{result}"
    if not schedule.channels:  # one that orders its channels itself has messages wait where it says
        assert result.receive_depth <= 2, f"{case}: {result.receive_depth} receives wait unread on a channel"


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
    """As many sends as receives; every unit synced and updated on every holder in every round."""
    sends = [e for entries in lowered.lists for e in entries if isinstance(e, Transfer)]
    assert sum(e.sends for e in sends) * 2 == len(sends)
    for op in (Op.S, Op.U):
        found = sum(1 for entries in lowered.lists for e in entries if isinstance(e, Action) and e.op is op)
        all_of_them = lowered.steps * sum(len(workers) for workers in lowered.holders)
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


@pytest.mark.parametrize("name", ["cyclic", "pipedream", "pipedream_2bw"])
def test_training_of_any_length_runs_from_one_lowered_period(name: str) -> None:
    schedule = schedules.build(name, workers=3, microbatches=3, steps=6)
    lowered = lower(schedule)
    assert lowered.period, "the period is found again in the lowered lists"
    costs = even_costs(stages=schedule.stages, workers=3)
    for more in (0, 1, 4):
        longer = lowered.repeated(more)
        assert check(longer).ok
        fresh = lower(schedule.repeated(schedule.repeats + more))
        assert sorted(map(str, longer.lists[0])) == sorted(map(str, fresh.lists[0]))
        assert simulate(longer, costs).makespan_s == simulate(fresh, costs).makespan_s


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [Mode.INLINE, Mode.EARLY])
def test_every_schedule_can_recompute(name: str, mode: Mode) -> None:
    for case in cases((2, 4), (4,), names=[name], every_option=False):
        schedule = case.build()
        if schedule.recompute is None:
            proved(lower(schedule, recompute=mode), case)
            continue
        with pytest.raises(MeshwrightError, match="settled its recompute itself"):
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
