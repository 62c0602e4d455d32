"""The ZeRO form of cyclic data parallelism: owners, tours of parameters, counts, memory, and what the checker catches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright import (
    MeshwrightError,
    Schedule,
    StageCost,
    check,
    forward_only,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
)
from meshwright.ir.action import Action, Entry, Kind, Op, Transfer, Value
from meshwright.ir.analysis.held_values import final, initial, late_units
from meshwright.ir.timeline import Lane

SIZES = [2, 3, 4, 5]


def built(n: int, steps: int = 6, first: int = 1, **options: object) -> Schedule:
    return schedules.build("cyclic", workers=n, microbatches=n, steps=steps, first=first, form="zero", **options)


def messages(schedule: Schedule) -> list[tuple[int, int, Value]]:
    """(sender, receiver, value) of every message that carries a stage."""
    sends = ((w, e) for w, row in enumerate(schedule.lists) for e in row if isinstance(e, Transfer) and e.sends)
    return [(worker, entry.peer, entry.value) for worker, entry in sends if entry.value.kind is not Kind.TURN]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("first", [0, 1])
def test_it_is_proved_and_only_owners_update(n: int, first: int) -> None:
    lowered = lower(built(n, first=first))
    assert check(lowered).ok and lowered.owners == tuple(reversed(range(n)))
    assert schedule_from_json(schedule_to_json(lowered)) == lowered
    for worker, row in enumerate(lowered.lists):
        assert {e.stage for e in row if isinstance(e, Action) and e.op is Op.U} == {n - 1 - worker}
        held = {value.stage for value in initial(lowered, worker)}
        assert held == {n - 1 - worker} == {value.stage for value in final(lowered, worker)}
        assert late_units(lowered, worker) == ((n - 1 - worker,) if first and worker else ())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_number_of_stage_messages(n: int, steps: int) -> None:
    found = Counter(value.kind for _, _, value in messages(lower(built(n, steps))))
    assert found == {Kind.PARAM: 2 * n * (n - 1) * steps, Kind.PARTIAL: n * (n - 1) * steps, Kind.SUM: (n - 1) * steps}
    assert found.total() == steps * (3 * n * (n - 1) + n - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_time_messages_per_step_and_bytes_per_round(n: int) -> None:
    steps, size = 5, 8000.0
    costs = [StageCost(1.0, 0.5, 0.5, parameter_bytes=size, optimizer_bytes=2 * size) for _ in range(n)]
    schedule = built(n, steps)
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s == 2 * n * steps + 2 * (n - 1) and timeline.bubble_ratio == pytest.approx(0.0)
    sent: Counter[tuple[int, int]] = Counter()
    steady = 0
    for span in timeline.spans:
        if span.lane is Lane.SEND and isinstance(span.entry, Transfer) and span.entry.value.kind is not Kind.TURN:
            sent[span.worker, round(span.start_s)] += 1
            steady += 4 * n <= span.start_s < 6 * n
    assert max(sent.values()) == 2
    whole = n * size
    assert steady * size == (3 * n * (n - 1) + n - 1) / n**2 * whole * n
    for worker, levels in enumerate(timeline.memory):
        copies = timeline.parameter_copies[worker]
        assert copies <= 5, "its own stage, of which a border keeps two versions, and parameters in use, arriving and leaving"
        gradients = 4 * size  # of its own stage, one that it adds to, one that arrives and one that leaves
        assert max(level.bytes for level in levels) <= copies * size + gradients + 2 * size, "optimizer state of one stage"


@pytest.mark.parametrize("n", SIZES)
def test_a_tour_goes_round_the_ring_from_the_owner(n: int) -> None:
    lowered = lower(built(n, 4))
    hops: dict[Value, list[tuple[int, int]]] = {}
    for sender, receiver, value in messages(lowered):
        hops.setdefault(value, []).append((sender, receiver))
    for stage in range(n):
        for part in (0, 1):
            tour = hops[Value(Kind.PARAM, stage, version=2, part=part)]
            ring = [(n - 1 - stage + k) % n for k in range(n)]
            assert sorted(tour) == sorted(pairwise(ring)), (stage, part)
        sums = hops.get(Value(Kind.SUM, stage, version=2), [])
        assert sums == ([(n - 1, n - 1 - stage)] if stage else [])


def test_fewer_stages_than_workers_are_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"got 2 and 4.*busy for 50% of the time"):
        built(4, 4, chunks=2)


@pytest.mark.parametrize("ties", [((0, 2),), ((0, 1, 2), (1, 2))])
def test_tie_groups_belong_to_the_owner_of_their_first_stage(ties: tuple[tuple[int, ...], ...]) -> None:
    lowered = lower(replace(built(3, 4), ties=ties))
    assert check(lowered).ok
    assert [lowered.holders[3 + i] for i in range(len(ties))] == [(2 - group[0],) for group in ties]


def test_unequal_stages() -> None:
    costs = [StageCost(4.0 if s == 1 else 1.0, 4.0 if s == 1 else 1.0) for s in range(4)]
    schedule = built(4, 8, costs=costs)
    assert check(lower(schedule, costs=costs)).ok
    assert simulate(schedule, costs).bubble_ratio < 0.25, "a stage is used by one worker after another, so a slow one holds all"


def test_evaluation_hands_parameters_on() -> None:
    lowered = lower(forward_only(built(4, 1)))
    assert check(lowered).ok
    assert Counter(value.kind for _, _, value in messages(lowered)) == {Kind.PARAM: 4 * 3}


def changed(schedule: Schedule, change: Callable[[int, Entry], Entry | None]) -> Schedule:
    rows = [[change(worker, entry) for entry in row] for worker, row in enumerate(schedule.lists)]
    return schedule.with_lists(tuple(tuple(entry for entry in row if entry is not None) for row in rows))


@pytest.mark.parametrize("part", [0, 1])
def test_a_dropped_token_is_caught(part: int) -> None:
    lowered, token = lower(built(3)), Value(Kind.PARAM, 1, version=2, part=part)

    def drop(_: int, entry: Entry) -> Entry | None:
        return None if isinstance(entry, Transfer) and entry.value == token else entry

    result = check(changed(lowered, drop))
    assert result.law == "version" and f"{token}, but version 2 of unit 1 does not exist there" in result.reason
    one_end = changed(lowered, lambda w, e: None if isinstance(e, Transfer) and (e.value, w, e.sends) == (token, 2, True) else e)
    assert check(one_end).law == "deadlock"


def test_a_token_of_another_version_is_caught() -> None:
    lowered, token = lower(built(3)), Value(Kind.PARAM, 1, version=2, part=1)

    def older(_: int, entry: Entry) -> Entry:
        wrong = isinstance(entry, Transfer) and entry.value == token
        return entry._replace(value=token._replace(version=1)) if wrong else entry

    result = check(changed(lowered, older))
    assert result.law in ("version", "copy") and "1param" in result.reason


def test_a_token_for_forwards_is_none_for_backwards() -> None:
    lowered, token = lower(built(3)), Value(Kind.PARAM, 1, version=2, part=1)

    def swapped(_: int, entry: Entry) -> Entry:
        wrong = isinstance(entry, Transfer) and entry.value == token
        return entry._replace(value=token._replace(part=0)) if wrong else entry

    assert not check(changed(lowered, swapped)).ok


def test_a_moved_owner_is_caught() -> None:
    lowered = lower(built(3))
    result = check(replace(lowered, owners=(2, 0, 1)))
    assert result.law == "placement" and "does not hold unit" in result.reason
    result = check(replace(built(3), owners=(2, 0, 1)))
    assert not result.ok and "does not hold unit" in result.reason


def test_parameters_are_sent_only_where_stages_have_owners() -> None:
    lowered = lower(built(2))
    result = check(replace(lowered, owners=()))
    assert not result.ok
    plain = lower(schedules.build("cyclic", workers=2, microbatches=2, steps=2))
    sent = Value(Kind.PARAM, 0, piece=0)
    more = plain.with_lists(((Transfer(True, sent, 1), *plain.lists[0]), (Transfer(False, sent, 0), *plain.lists[1])))
    result = check(replace(more, lowered=True))
    assert result.law == "message" and "only act, grad, turn, partial, sum are sent" in result.reason


@pytest.mark.parametrize(
    "more", [{"owners": (0,)}, {"owners": (0, 7)}, {"owners": [1, 0]}, {"flush": True}, {"ring": False}], ids=str
)
def test_malformed_owners_are_refused(more: dict[str, object]) -> None:
    result = check(replace(built(2), **more))
    assert not result.ok and "owners" in result.reason


@pytest.mark.parametrize(("options", "what"), [({"rule": "v1"}, "rule=v1"), ({"margin": 1}, "margin=1")])
def test_other_rules_are_refused(options: dict[str, object], what: str) -> None:
    with pytest.raises(MeshwrightError, match=f"under rule v2 only, got {what}"):
        built(3, **options)
