"""Evaluation: the forwards of every schedule are a schedule of their own, which is proved, lowered, simulated and repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import (
    Action,
    Cluster,
    Link,
    Op,
    Recompute,
    Schedule,
    StageCost,
    Transfer,
    check,
    even_costs,
    forward_only,
    from_csv,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
    to_csv,
)
from meshwright.ir.action import Entry, actions
from tests.support import oracle
from tests.support.cases import Case, cases, tiny

NAMES = schedules.names()
POLICIES = ("lazy", "eager", "eager-opt", "ring")


def forwards(entries: tuple[Entry, ...]) -> list[Action]:
    return [a._replace(version=0) for entry in entries for a in actions(entry) if a.op is Op.F]


def proved(schedule: Schedule, about: object) -> None:
    result = check(schedule)
    assert result.ok, f"{about}\n{result}"
    assert result.peak_activations == (0,) * schedule.workers, about
    legal = oracle.blocking(schedule) if schedule.lowered else oracle.free(schedule)
    assert legal.legal, f"{about}: {legal.why}"


@pytest.mark.parametrize("name", NAMES)
def test_the_forwards_of_every_schedule_are_a_schedule(name: str) -> None:
    for case in cases((1, 2, 4), (1, 4, 8), names=[name]):
        for schedule in (case.build(), lower(case.build())):
            found = forward_only(schedule)
            assert found.forward_only and not schedule.forward_only
            assert found.placement == schedule.placement
            assert [forwards(entries) for entries in found.lists] == [forwards(entries) for entries in schedule.lists], case
            assert forward_only(found) == found
            proved(found, case)
        for policy in POLICIES:
            lowered = lower(found, sync=policy)
            proved(lowered, case)
            entries = [entry for row in lowered.lists for entry in row]
            assert all(isinstance(entry, Transfer) or {a.op for a in actions(entry)} == {Op.F} for entry in entries)
            assert lower(lowered) is lowered and forward_only(lowered) == found


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_kept(name: str) -> None:
    """Memory is the parameters and what is on its way, however many microbatches there are."""
    size = StageCost(forward_s=1.0, activation_bytes=100.0, output_bytes=1.0, gradient_bytes=1.0, parameter_bytes=10.0)
    for case in cases((2, 4), (4, 8), names=[name], every_option=False):
        found = forward_only(case.build())
        for cluster in (None, Cluster(Link(0.5, 8.0))):
            timeline = simulate(found, [size] * found.stages, cluster)
            assert timeline.makespan_s >= timeline.lower_bound_s - 1e-9
            for worker, held in enumerate(found.placement.held):
                assert timeline.peak(worker) == 0
                base = 10.0 * len({stage for _, stage in held})
                assert base <= timeline.peak_bytes(worker) < base + 100.0, "messages, but no activations"
                assert timeline.memory[worker][-1].bytes == pytest.approx(base), "nothing is left but the parameters"
                assert timeline.busy_s(worker) == pytest.approx(simulated_work(found, worker))


def simulated_work(schedule: Schedule, worker: int) -> float:
    """A slot for every forward, for the rows and the part that this worker has of it."""
    total = 0.0
    for action in forwards(schedule.lists[worker]):
        team = schedule.placement.team(action.replica, action.stage, action.mb)
        total += 1 / len(team) / (1 if action.part < 0 else schedule.parts)
    return total


@pytest.mark.parametrize("case", tiny(every_option=False), ids=str)
def test_a_forward_too_few_or_too_many_is_refused(case: Case) -> None:
    found = forward_only(case.build())
    for schedule in (found, lower(found)):
        for worker, entries in enumerate(schedule.lists):
            for index in range(len(entries)):
                for wrong in (entries[:index] + entries[index + 1 :], entries[: index + 1] + entries[index:]):
                    lists = tuple(wrong if w == worker else e for w, e in enumerate(schedule.lists))
                    assert not check(schedule.with_lists(lists)).ok, (str(entries[index]), worker)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_of_any_length_repeats_one_period(name: str) -> None:
    case = next(cases((2, 4), (4, 8), names=[name]))
    one = forward_only(case.build())
    for repeats in (2, 3):
        longer = one.repeated(repeats)
        assert longer.steps == repeats * one.steps
        assert {a.version for row in longer.lists for a in forwards(row)} == {0}
        proved(longer, case)
        lowered = lower(one).repeated(repeats)
        proved(lowered, case)
        assert lower(longer).lists == lowered.lists


def test_a_forward_reads_the_parameters_that_are_there() -> None:
    plain = forward_only(schedules.build("onef1b", workers=2, microbatches=2))
    for schedule in (plain, lower(plain)):
        wrong = tuple(tuple(e._replace(version=1) if isinstance(e, Action) else e for e in row) for row in schedule.lists)
        result = check(replace(schedule, period=wrong))
        assert not result.ok and result.law == ("version" if schedule.lowered else "deadlock"), result


def test_one_backward_makes_it_training_again() -> None:
    """F alone is evaluation; F alone for some microbatches is a backward that is missing."""
    plain = schedules.build("onef1b", workers=2, microbatches=2)
    for worker, entries in enumerate(plain.lists):
        for entry in entries:
            if isinstance(entry, Action) and entry.op is Op.B:
                some = forward_only(plain).lists
                lists = tuple((*row, entry) if w == worker else row for w, row in enumerate(some))
                result = check(replace(plain, period=lists))
                assert not result.ok and result.law == "once" and "backward is missing" in str(result.reason)


def test_lists_of_forwards_are_seconds_of_pipeline() -> None:
    """Fill and then one forward after the other: (N + D - 1) F on a line, and ties and recompute change nothing."""
    plain = schedules.build("onef1b", workers=4, microbatches=8)
    found = forward_only(replace(plain, ties=((0, 3),), recompute=(Recompute(),) * 4))
    costs = even_costs(stages=4, workers=4, recompute_s=1.0)
    timeline = simulate(found, costs)
    assert timeline.makespan_s == 11 and timeline.bubble_ratio == pytest.approx(3 / 11)
    assert check(found).ok and check(lower(found, recompute="early")).ok


@pytest.mark.parametrize("name", NAMES)
def test_files_of_forwards_read_back(name: str) -> None:
    case = next(cases((2, 4), (4, 8), names=[name]))
    for schedule in (forward_only(case.build()), lower(forward_only(case.build()))):
        assert schedule_from_json(schedule_to_json(schedule)) == schedule


def test_csv_of_forwards_has_no_updates() -> None:
    plain = forward_only(schedules.build("onef1b", workers=2, microbatches=2))
    assert to_csv(lower(plain)) == "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n"
    assert from_csv(to_csv(lower(plain)), "onef1b") == lower(plain)
