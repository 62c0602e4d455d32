"""The laws hold for what runs: what lowering makes of a schedule, what goes between workers, what is added up where."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright import Action, MeshwrightError, Op, Placement, Schedule, Transfer, check, lower, schedule_from_json, schedules
from meshwright.ir.action import NONE, Kind, parse
from meshwright.ir.analysis.carried_values import carried
from meshwright.ir.analysis.order import Flow, rendezvous
from meshwright.ir.analysis.reduction_groups import groups
from meshwright.passes.laws import Law
from meshwright.passes.reduction_law import group_faults, reduced, refuse_groups
from meshwright.passes.sync import Sync
from tests.support.cases import Case, flat, tiny
from tests.support.mutations import CHIMERA, handmade, low, plus, with_rows
from tests.support.whole_numbers_run import verdict

FILE: dict[str, Any] = {"schema": 1, "kind": "schedule", "name": "x", "microbatches": 1, "placement": [[[[0]], [[1]]]]}


def test_a_deadlock_behind_a_tie_is_refused() -> None:
    """Worker 0 updates before it has a gradient; the tie made lowering lose both lists."""
    said = {"ties": [[0, 1]], "prologue": ["0U 0F0 0B0", "1F0 1B0 1U"], "period": [], "flush": False}
    schedule = schedule_from_json(json.dumps(FILE | said))
    result = check(schedule)
    assert result.law == Law.DEADLOCK and result.worker == 0 and "0wgrad0" in str(result.reason), str(result)
    with pytest.raises(MeshwrightError, match="waits for 0wgrad0"):
        lower(schedule)


@pytest.mark.parametrize("row", ["{0}F0 {0}B0 {0}U", "{0}F0 {0}B0 {0}S {0}U"])
def test_a_tie_that_nobody_updates_is_refused(row: str) -> None:
    schedule = handmade(row.format(0), row.format(1), ties=((0, 1),))
    result = check(schedule)
    assert result.law == Law.ONCE and result.action in ("2U", "2S") and "missing on worker 0" in str(result.reason), str(result)
    with pytest.raises(MeshwrightError, match="breaks the law of once"):
        lower(schedule)


def test_a_tie_that_is_placed_beside_the_syncs_is_kept() -> None:
    """Without a flush lowering adds the updates of ties, and loses nothing that is there."""
    rows = ("0F0 0B0 0S 2S 0U", "1F0 1B0 1S 2S 1U")
    lowered = lower(handmade(*rows, ties=((0, 1),), flush=False))
    assert check(lowered).ok and not verdict(flat(lowered))
    for row, entries in zip(rows, lowered.lists, strict=True):
        assert [str(entry) for entry in entries if str(entry) in row.split()] == row.split()
        assert "2U" in map(str, entries)


PAIR = ("0F0 0act0>1 {} 0grad0<1 0B0 {} 0S {} 0U", "0act0<0 {} 1F0 1B0 0grad0>0 {} 1S {} 1U")
CARRIED = [("0param~0", 0), ("0opt~0", 0), ("0saved0~0", 0), ("0wgrad0~0", 1), ("0sum~0", 2), ("0norm~0", 2)]


@pytest.mark.parametrize(("value", "place"), CARRIED, ids=[value for value, _ in CARRIED])
def test_what_a_run_cannot_carry_is_refused(value: str, place: int) -> None:
    """There and back again, so that all is where it was; a norm is there when the reduction is."""
    norm = " N" if "norm" in value else ""
    there, back = [""] * 3, [""] * 3
    there[place], back[place] = f"{value}>1 {value}<1", f"{value}<0 {value}>0"
    rows = [PAIR[0].format(*there), PAIR[1].format(*back)]
    schedule = low(*(row.replace("S ", f"S{norm} ", 1) for row in rows), norm=bool(norm))
    if "sum" in value or "norm" in value:  # these are not used up: one way is enough
        rows = [row.replace(f" {value}<1", "").replace(f" {value}>0", "") for row in rows]
        schedule = low(*(row.replace("S ", f"S{norm} ", 1) for row in rows), norm=bool(norm))
    result = check(schedule)
    assert result.law == Law.MESSAGE and result.action == f"{value}>1", str(result)
    assert Kind(value.strip("0~")) not in carried(schedule) and verdict(schedule)


def test_an_activation_that_goes_over_a_third_worker_is_refused() -> None:
    placement = Placement(((((0,),), ((2,),), ((1,),)),))
    rows = (
        "0F0 0act0>1 0grad0<2 0B0 0S 0U",
        "0act0<0 0act0>2 1act0<2 2F0 2B0 1grad0>2 2S 2U",
        "0act0<1 1F0 1act0>1 1grad0<1 1B0 0grad0>0 1S 1U",
    )
    result = check(low(*rows, placement=placement))
    assert (result.law, result.worker, result.action) == (Law.MESSAGE, 1, "0act0>2"), str(result)


def test_a_sum_is_not_sent_to_who_has_no_place_for_it() -> None:
    ring = lower(schedules.build("chimera", workers=4, microbatches=4), sync="ring")
    entry = next(e for e in ring.lists[0] if isinstance(e, Transfer) and e.sends and e.value.kind is Kind.SUM)
    other = next(w for w in range(4) if w not in ring.holders[entry.value.stage])
    at = ring.lists[0].index(entry)
    first = (*ring.lists[0][:at], Transfer(True, entry.value, other), *ring.lists[0][at:])
    more = with_rows(ring, w0=first)
    place = next(i for i, e in enumerate(more.lists[other]) if isinstance(e, Action) and e.op is Op.N)
    row = more.lists[other]
    more = with_rows(more, **{f"w{other}": (*row[:place], Transfer(False, entry.value, 0), *row[place:])})
    result = check(more)
    assert not result.ok and result.law in (Law.MESSAGE, Law.DEADLOCK), str(result)


def test_messages_of_every_schedule_are_in_the_table() -> None:
    for case in tiny(every_option=False):
        for sync in Sync:
            lowered = lower(case.build(), sync=sync)
            kinds = {e.value.kind for row in lowered.lists for e in row if isinstance(e, Transfer)}
            assert kinds <= set(carried(lowered)), f"{case} {sync}"


def test_a_stale_version_with_a_flush_is_refused() -> None:
    row = "{0}F0 {0}B0 {0}S {0}U {0}F1{1} {0}B1{1} {0}S#1 {0}U#1"
    assert check(handmade(row.format(0, "#1"), row.format(1, "#1"))).ok
    result = check(handmade(row.format(0, ""), row.format(1, "#1")))
    assert (result.law, result.worker, result.action) == (Law.VERSION, 0, "0F1"), str(result)
    assert "version 0 in round 1" in str(result.reason)


def test_an_update_uses_the_norm_of_its_round() -> None:
    """Worker 0 has no microbatch in round 1, so that it could take part in its norm before its own update."""
    teams = Placement(((((0,), (1,)),),))
    other = "0S N 0U 0F1#1 0B1#1 0S#1 N#1 0U#1"
    right = low("0F0 0B0 0S N 0U 0S#1 N#1 0U#1", other, placement=teams, norm=True)
    assert check(right).ok and not verdict(right)
    late = low("0F0 0B0 0S N 0S#1 N#1 0U 0U#1", other, placement=teams, norm=True)
    result = check(late)
    assert (result.law, result.worker, result.action) == (Law.ORDER, 0, "0U") and "reduction of round 1" in str(result.reason)
    assert verdict(late)


@pytest.mark.parametrize("case", [case for case in tiny() if case.build().flush], ids=str)
def test_a_ring_of_a_schedule_that_has_placed_its_syncs(case: Case) -> None:
    """All holders have their syncs in the lists, also those without a gradient: a ring goes through the others alone."""
    eager = lower(case.build())
    rows = [tuple(e for e in row if not isinstance(e, Transfer)) for row in eager.lists]
    placed = replace(eager.with_lists(tuple(rows)), lowered=False, norm=False)
    ring = lower(placed, sync="ring")
    assert ring.ring and check(ring).ok, str(check(ring))
    assert not verdict(flat(ring))


def test_a_ring_leaves_out_those_that_add_nothing() -> None:
    teams = Placement(((((0,), (1,)),),))
    schedule = handmade("0F0 0B0 0S 0U", "0S 0U", placement=teams)
    ring = lower(schedule, sync="ring")
    assert check(ring).ok and not verdict(ring), str(check(ring))
    assert [" ".join(map(str, row)) for row in ring.lists] == ["0F0 0B0 0S 0U 0sum>1", "0sum<0 0U"]
    again = check(replace(schedule, ring=True))
    assert (again.law, again.worker, again.action) == (Law.ONCE, 1, "0S"), str(again)


# -- reductions


def broken_reductions(lowered: Schedule) -> list[str]:
    """What the law of reductions alone says of lists."""
    events, _ = rendezvous(lowered)
    return [f"{v.law}: {v.entry} on worker {v.worker} {v.reason}" for v in reduced(Flow.of(lowered), events)]


SYNCED = [case for case in tiny(every_option=False) if case.name in ("chimera", "onef1b", "cyclic", "gems", "zbv")]


@pytest.mark.parametrize("sync", ["eager", "ring"])
@pytest.mark.parametrize("case", SYNCED, ids=str)
def test_every_gradient_enters_one_reduction(case: Case, sync: str) -> None:
    lowered = flat(lower(case.build(), sync=sync))
    assert broken_reductions(lowered) == []
    for worker, row in enumerate(lowered.lists):
        for index, entry in enumerate(row):
            if isinstance(entry, Action) and entry.op is Op.S:
                for other in (row[:index] + row[index + 1 :], (*row[:index], entry, *row[index:])):
                    changed = with_rows(lowered, **{f"w{worker}": other})
                    result = check(changed)
                    assert not result.ok and entry.op.value in f"{result.action} {result.reason}", str(result)


def test_a_dropped_and_a_doubled_gradient_are_named() -> None:
    """What the effects of a sync say is not trusted: gradients are followed into every update."""
    lowered = flat(lower(CHIMERA))
    flow = Flow.of(lowered)
    events, _ = rendezvous(lowered)
    worker, index = next((w, i) for w, row in enumerate(lowered.lists) for i, e in enumerate(row) if str(e) == "0S")
    flow.reads[worker][index] = ()
    (first, *_) = list(reduced(flow, events))
    assert first.law is Law.REDUCTION and "without 0wgrad0~0" in first.reason
    flow = Flow.of(lowered)
    narrow = [event if len(event) < 2 or str(lowered.lists[event[0][0]][event[0][1]]) != "0S" else event[:1] for event in events]
    assert any(v.law is Law.REDUCTION and "without" in v.reason for v in reduced(flow, narrow))
    twice = [event * 2 if len(event) == 2 and str(lowered.lists[event[0][0]][event[0][1]]) == "0S" else event for event in events]
    assert any("a second time" in v.reason for v in reduced(flow, twice))


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("sync", ["eager", "ring"])
@pytest.mark.parametrize("case", SYNCED, ids=str)
def test_groups_over_copies_are_proved(case: Case, sync: str, copies: int) -> None:
    """The groups are right; one that misses a rank, has one twice or one too many is named."""
    lowered = flat(lower(replace(case.build(), ties=((0, case.build().stages - 1),)), sync=sync))
    found = groups(lowered, copies)
    assert list(group_faults(lowered, copies, found)) == []
    for unit, of_unit in enumerate(found):
        for number, ranks in enumerate(of_unit):
            for rank in ranks:
                others = tuple(r for r in ranks if r != rank)
                faults = _faults(lowered, copies, found, unit, (*of_unit[:number], others, *of_unit[number + 1 :]))
                assert any(f"rank {rank} " in fault and f"unit {unit}" in fault for fault in faults), faults
                assert _faults(lowered, copies, found, unit, (*of_unit, (rank,)))
                if len(ranks) > 1:
                    assert _faults(lowered, copies, found, unit, ((rank,), others))
        assert _faults(lowered, copies, found, unit, ())
    with pytest.raises(MeshwrightError, match="breaks the law of reduction: rank"):
        refuse_groups(lowered, copies, ((), *found[1:]))


def _faults(schedule: Schedule, copies: int, found: Any, unit: int, of_unit: Any) -> list[str]:
    return list(group_faults(schedule, copies, (*found[:unit], of_unit, *found[unit + 1 :])))


def test_placed_syncs_of_replicas_lower_to_a_ring_too() -> None:
    lowered = lower(plus(CHIMERA, "0S 1S N 0U 1U", "0S 1S N 0U 1U"), sync="ring")
    assert check(lowered).ok and not verdict(lowered)
    assert {str(e) for row in lowered.lists for e in row if isinstance(e, Action) and e.op is Op.S} == {"0S", "1S"}
    assert parse("0S") in lowered.lists[0]


@pytest.mark.parametrize(
    ("lists", "more"),
    [
        (("0F0 0B0 0U 0F1 0B1 0U#1", "0F0 0B0 0U 0F1#1 0B1#1 0U#1"), {"placement": Placement(((((0, 1),),),))}),
        (("0F0.0 0F0.1 0F1.0 0B0.0 0B0.1 0U 0F1#1.1 0B1.0 0B1#1.1 0U#1",), {"parts": 2}),
    ],
    ids=["team", "halves"],
)
def test_all_rows_of_a_microbatch_read_one_version_of_a_stage(lists: tuple[str, ...], more: dict[str, Any]) -> None:
    found = check(handmade(*lists, flush=False, **more))
    assert found.law == "version" and "other rows of microbatch 1 read 0 there" in found.reason


@pytest.mark.parametrize("odd", [Action(Op.N, 0), Action(Op.N, NONE, replica=1), Action(Op.N, NONE, mb=2)], ids=str)
def test_a_reduction_with_more_than_a_round_is_judged_too(odd: Action) -> None:
    plain = low("0F0 0B0 0S N 0U", norm=False)
    lists = tuple(tuple(odd if entry == Action(Op.N, NONE) else entry for entry in row) for row in plain.period)
    found = check(replace(plain, period=lists))
    assert not found.ok and found.reason
