"""Cyclic data parallelism: the mask, the versions, constant activations, one stage message per worker and time step."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from meshwright import (
    MeshwrightError,
    StageCost,
    check,
    even_costs,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
)
from meshwright.ir.action import Action, Kind, Op, Transfer
from meshwright.ir.analysis.held_values import final, late_units
from meshwright.ir.timeline import Lane
from tests.support.helpers import run

RULES = ["v1", "v2"]


def versions(n: int, rule: str, steps: int = 4, **options: object) -> dict[tuple[int, int, int], int]:
    """The version that worker i reads of stage j in round t, all counted from 1 as in the paper."""
    schedule = schedules.build("cyclic", workers=n, microbatches=n, steps=steps, rule=rule, **options)
    found = {}
    for worker, entries in enumerate(schedule.lists):
        for action in entries:
            if isinstance(action, Action) and action.op is Op.F:
                found[worker + 1, action.stage + 1, action.mb // n] = action.version
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_mask_of_v2_is_the_freshest_version_there_is(n: int) -> None:
    for (i, j, t), version in versions(n, "v2").items():
        assert version == (t if i + j >= n + 1 else max(0, t - 1))
        m = n * t + i - 1
        assert version == max(0, (m - (n - j)) // n)


def test_mask_of_four_as_printed() -> None:
    found = versions(4, "v2")
    rows = ["".join(str(int(found[i, j, 2] == 2)) for j in range(1, 5)) for i in range(1, 5)]
    assert rows == ["0001", "0011", "0111", "1111"]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_v1_always_reads_the_version_before(n: int) -> None:
    assert all(version == max(0, t - 1) for (_, _, t), version in versions(n, "v1").items())


@pytest.mark.parametrize("margin", [0, 1, 2, 4])
def test_margin_lies_between_the_rules(margin: int) -> None:
    for (i, j, t), version in versions(4, "v2", margin=margin).items():
        assert version == (t if i + j >= 5 + margin else max(0, t - 1))
    if margin == 4:
        assert versions(4, "v2", margin=4) == versions(4, "v1")


def test_more_workers_than_stages() -> None:
    for (i, j, t), version in versions(8, "v2", chunks=4).items():
        assert version == (t if i + j >= 5 else max(0, t - 1))


def test_a_fresher_mask_cannot_run() -> None:
    """Reading one anti-diagonal fresher than v2 wants a version that only comes later: refused, not run."""
    schedule = schedules.build("cyclic", workers=3, microbatches=3, steps=2)

    def fresher(action: Action) -> Action:
        i, j, t = action.mb % 3 + 1, action.stage + 1, action.mb // 3
        new = t if i + j >= 3 else max(0, t - 1)
        return action._replace(version=new) if action.op in (Op.F, Op.B) else action

    lists = []
    for entries in schedule.lists:
        own = [fresher(a) for a in entries if isinstance(a, Action) and a.op is not Op.U]
        out: list[Action] = []
        seen: dict[int, int] = {}
        for action in own:
            if action.op is Op.F and action.version > seen.get(action.stage, 0):
                out.append(Action(Op.U, action.stage, version=action.version - 1))
                seen[action.stage] = action.version
            out.append(action)
        out += [Action(Op.U, s, version=k) for k in range(2) for s in (2, 1, 0) if k >= seen.get(s, 0)]
        lists.append(tuple(out))
    bad = replace(schedule, prologue=tuple(lists), drain=(), period=(), repeats=0, turns=())
    staggered = replace(bad, turns=tuple((fresher(a), fresher(b)) for a, b in schedule.turn_edges))
    result = check(staggered)
    assert not result.ok and result.law == "deadlock"


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("rule", RULES)
def test_time_stages_and_live_activations(n: int, rule: str) -> None:
    steps = 4
    timeline = run("cyclic", n, n, 1.0, 1.0, steps=steps, rule=rule)
    assert timeline.makespan_s == 2 * n * steps + 2 * (n - 1)
    assert timeline.bubble_ratio == pytest.approx(0.0)
    for worker, spans in enumerate(timeline.compute):
        for span in spans:
            (action,) = [a for a in (span.entry,) if isinstance(a, Action)]
            i, j, t = worker + 1, action.stage + 1, action.mb // n
            begin = 2 * n * t + 2 * (i - 1)
            assert span.start_s == begin + (j - 1 if action.op is Op.F else 2 * n - j)
    for tau in range(2 * (n - 1), 2 * n * steps):
        running = [s for spans in timeline.compute for s in spans if s.start_s <= tau < s.end_s]
        assert sorted(s.entry.stage for s in running) == list(range(n))
        live = sum(
            1
            for worker in range(n)
            for f in timeline.compute[worker]
            for b in timeline.compute[worker]
            if f.entry.op is Op.F and b.entry == f.entry._replace(op=Op.B) and f.start_s <= tau < b.end_s
        )
        assert live == n * (n + 1) // 2


def test_live_activations_from_the_memory_curves() -> None:
    timeline = run("cyclic", 4, 4, 1.0, 1.0, steps=4)
    for tau in range(6, 32):
        held = 0.0
        for levels in timeline.memory:
            held += next((level.activations for level in reversed(levels) if level.time_s <= tau), 0.0)
        assert held == 10


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("rule", RULES)
def test_at_most_one_stage_message_per_worker_and_time_step(n: int, rule: str) -> None:
    steps = 6
    timeline = run("cyclic", n, n, 1.0, 1.0, steps=steps, rule=rule)
    sent: Counter[tuple[int, int]] = Counter()
    inside = 0
    for span in timeline.spans:
        if span.lane is Lane.SEND and isinstance(span.entry, Transfer) and span.entry.value.kind is not Kind.TURN:
            sent[span.worker, round(span.start_s)] += 1
            inside += 6 * n <= span.start_s < 8 * n
    steady = {key: count for key, count in sent.items() if key[1] < 2 * n * steps}
    assert max(steady.values()) == 1
    assert inside == 2 * n * (n - 1)


@pytest.mark.parametrize("rule", RULES)
def test_no_collective_is_left(rule: str) -> None:
    lowered = lower(schedules.build("cyclic", workers=4, microbatches=4, steps=4, rule=rule))
    assert lowered.ring
    assert not any(isinstance(e, Action) and e.op is Op.N for entries in lowered.lists for e in entries)


def test_routes_of_sums_in_v2() -> None:
    """The finished sum of stage j goes from worker N to N+1-j and on, and after N's own use round to N-j."""
    n = 4
    lowered = lower(schedules.build("cyclic", workers=n, microbatches=n, steps=5))
    hops: dict[int, set[tuple[int, int]]] = {}
    for worker, entries in enumerate(lowered.lists):
        for entry in entries:
            if isinstance(entry, Transfer) and entry.sends and entry.value.kind is Kind.SUM and entry.value.version == 1:
                hops.setdefault(entry.value.stage + 1, set()).add((worker + 1, entry.peer + 1))
    for j in range(1, n + 1):
        first = [n, *range(n + 1 - j, n)] if j > 1 else [n]
        second = [n, *range(1, n - j + 1)]
        wanted = set(itertools.pairwise(first)) | set(itertools.pairwise(second))
        assert hops[j] == wanted, j


def test_routes_of_sums_in_v1_are_the_ring() -> None:
    n = 4
    lowered = lower(schedules.build("cyclic", workers=n, microbatches=n, steps=5, rule="v1"))
    for worker, entries in enumerate(lowered.lists):
        for entry in entries:
            if isinstance(entry, Transfer) and entry.sends and entry.value.kind is Kind.SUM and entry.value.version == 1:
                assert entry.peer == (worker + 1) % n


@pytest.mark.parametrize("rule", RULES)
def test_one_copy_of_every_stage_is_enough(rule: str) -> None:
    timeline = run("cyclic", 4, 4, steps=5, rule=rule)
    assert list(timeline.parameter_copies) == [4.0] * 4


@pytest.mark.parametrize("rule", RULES)
def test_unequal_stages_hardly_stall(rule: str) -> None:
    costs = [StageCost(4.0 if s == 1 else 1.0, 4.0 if s == 1 else 1.0) for s in range(4)]
    schedule = schedules.build("cyclic", workers=4, microbatches=4, steps=8, costs=costs, rule=rule)
    assert check(schedule).ok
    assert simulate(schedule, costs).bubble_ratio < 0.05
    assert len(schedule.turns) == 3


def test_any_length_runs_from_one_period() -> None:
    two = schedules.build("cyclic", workers=3, microbatches=3, steps=3)
    ten = schedules.build("cyclic", workers=3, microbatches=3, steps=10)
    assert two.period == ten.period and two.prologue == ten.prologue and two.drain == ten.drain
    assert two.repeated(8) == ten


def test_unequal_stages_stall_once_in_the_round_behind_the_fill() -> None:
    """Leads are whole actions: what they are too long by is made up for once, in round 1, and never again."""
    for rng in (Random(seed) for seed in range(10)):
        n = rng.choice((2, 3, 4))
        costs = [StageCost(f, f, f) for f in (rng.uniform(0.5, 2.0) for _ in range(n))]
        timeline = simulate(schedules.build("cyclic", workers=n, microbatches=n, steps=5, costs=costs), costs)
        for spans in timeline.compute:
            late = [b.entry for a, b in itertools.pairwise(spans) if b.start_s > a.end_s + 1e-9]
            assert len(late) <= 1 and all(isinstance(e, Action) and e.mb // n == 1 for e in late)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("options", [{"rule": "v1"}, {}, {"margin": 1}, {"stagger": "starts"}], ids=str)
def test_lists_that_continue_a_run_read_the_version_before_the_border(n: int, options: dict[str, object]) -> None:
    for steps in (1, 2, 5):
        schedule = schedules.build("cyclic", workers=n, microbatches=n, steps=steps, first=1, **options)
        assert schedule.steps == steps and schedule.rounds == range(1, 1 + steps)
        lowered = lower(schedule)
        assert check(lowered).ok
        assert schedule_from_json(schedule_to_json(lowered)) == lowered
        whole = schedules.build("cyclic", workers=n, microbatches=n, steps=steps + 1, **options)
        later = {a for row in whole.lists for a in row if a.op is Op.F and a.mb >= n}
        assert {a for row in schedule.lists for a in row if a.op is Op.F} == later
        for worker in range(n):
            late = late_units(schedule, worker)
            assert late == tuple(s for s in range(n) if Action(Op.F, s, n + worker, version=0) in schedule.lists[worker])
            ends = {(v.stage, v.version) for v in final(schedule, worker) if v.kind is Kind.PARAM}
            assert ends == {(s, steps + 1) for s in range(n)} | {(s, steps) for s in late}


@pytest.mark.parametrize("rule", RULES)
def test_lists_that_continue_a_run_take_the_same_time_and_end_with_two_versions(rule: str) -> None:
    n, steps = 4, 3
    costs = even_costs(stages=n, workers=n, forward_s=1.0, backward_s=1.0)
    timeline = simulate(schedules.build("cyclic", workers=n, microbatches=n, steps=steps, first=1, rule=rule), costs)
    assert timeline.makespan_s == 2 * n * steps + 2 * (n - 1)
    late = [4, 4, 4, 4] if rule == "v1" else [3, 2, 1, 0]
    assert list(timeline.parameter_copies) == [n + count for count in late]


def test_a_version_two_rounds_old_is_refused() -> None:
    schedule = schedules.build("cyclic", workers=2, microbatches=2, steps=2, first=2)
    old = tuple(tuple(a._replace(version=0) if a.mb == 4 else a for a in row) for row in schedule.lists)
    result = check(replace(schedule.with_lists(old), turns=()))
    assert not result.ok and "0param" in result.reason


def test_microbatches_before_the_first_round_are_refused() -> None:
    result = check(replace(schedules.build("cyclic", workers=2, microbatches=2, steps=3), first=1))
    assert not result.ok and "the first round is 1, with microbatches from 2 on" in result.reason


def test_only_schedules_that_can_continue_a_run_take_first() -> None:
    with pytest.raises(MeshwrightError, match="gpipe cannot continue a run at round 3"):
        schedules.build("gpipe", workers=2, microbatches=2, first=3)
    with pytest.raises(MeshwrightError, match="first must be a whole number of at least 0"):
        schedules.build("cyclic", workers=2, microbatches=2, first=-1)


def test_stagger_is_chosen_by_costs_or_by_the_option() -> None:
    uneven = [StageCost(1.0, 1.0, 1.0), StageCost(2.0, 2.0, 2.0)]

    def turns(**more: object) -> int:
        return len(schedules.build("cyclic", workers=2, microbatches=2, steps=3, **more).turn_edges)

    assert turns() == turns(costs=uneven, stagger="turns") > turns(stagger="starts") == turns(costs=uneven) == 1
