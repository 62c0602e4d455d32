"""Every law by name: the shortest schedule that breaks it, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import Action, Placement, Recompute, Schedule, check
from meshwright.ir.action import parse
from meshwright.ir.schedule import ChannelOrder
from meshwright.passes.laws import Law
from tests.support import oracle
from tests.support.mutations import CHIMERA, ONEF1B, handmade, low

END = "0S N 0U"
TURNS = tuple((parse(writer), parse("1B0")) for writer in ("1F0", "0F0"))
LAWS: list[tuple[Law, Schedule, int, str | None, list[str]]] = [
    (Law.PLACEMENT, handmade("0F0 0B0 1F0", "1B0"), 0, "1F0", ["1F0 belongs on worker 1"]),
    (Law.PLACEMENT, handmade("0F0 0B0", "1F0 1B0 2F0"), 1, "2F0", ["2 stages", "1 replicas", "1 parts"]),
    (Law.PLACEMENT, handmade("0F0@1 0B0@1"), 0, "0F0@1", ["1 replicas"]),
    (Law.PLACEMENT, handmade("0F0.1 0B0.1"), 0, "0F0.1", ["1 parts"]),
    (Law.PLACEMENT, handmade("0F0 0B0 1U", "1F0 1B0"), 0, "1U", ["worker 0", "unit 1"]),
    (Law.PLACEMENT, handmade("0F0 0B0 4U", "1F0 1B0"), 0, "4U", ["unit 4"]),
    (Law.PLACEMENT, low("0F0 0act0>7 0B0", "1F0 1B0"), 0, "0act0>7", ["worker 7"]),
    (Law.PLACEMENT, low("0F0 0act0>0 0B0", "1F0 1B0"), 0, "0act0>0", ["worker 0"]),
    (Law.PLACEMENT, handmade("0F0 0B0 0G"), 0, "0G", ["gather"]),
    (Law.PLACEMENT, handmade("0F0 0B0", placement=Placement.line(2)), 0, None, ["2 workers", "1 lists"]),
    (Law.ONCE, handmade("0F0 0F0 0B0"), 0, "0F0", ["0F0 comes twice"]),
    (Law.ONCE, handmade("0F0 0B0 0B0"), 0, "0B0", ["0B0 comes twice"]),
    (Law.ONCE, handmade("0F0 0B0", "1F0"), 1, "1F0", ["stage 1", "microbatch 0", "backward is missing"]),
    (Law.ONCE, handmade("0F0 0I0"), 0, "0I0", ["stage 0", "microbatch 0", "W is missing"]),
    (Law.ONCE, handmade("0F0 0B0", ""), 1, "1F0", ["1F0 is missing on worker 1"]),
    (Law.ONCE, handmade("0F1 0B1", microbatches=2), 0, None, ["microbatch 0"]),
    (Law.ONCE, low("0F0 0B0 0S N"), 0, "0U", ["0U is missing on worker 0"]),
    (Law.ONCE, low("0F0 0B0 N 0U"), 0, "0S", ["0S is missing on worker 0"]),
    (Law.ONCE, low("0F0 0B0 0S 0U", norm=True), 0, "N", ["N is missing on worker 0"]),
    (Law.ONCE, low("0F0 0B0 0S N 0U", norm=False), 0, "N", ["norm=False"]),
    (Law.ONCE, low("0F0 0B0 0S 0S N 0U"), 0, "0S", ["0S comes twice"]),
    (Law.ONCE, low("0F0 0B0 0S N 0U 0U#3"), 0, "0U#3", ["1 rounds"]),
    (Law.ONCE, handmade("0F0 0B0", "0F0@1 0B0@1", placement=Placement.mirrored(2)), 0, None, ["microbatch 0", "replica"]),
    (Law.ORDER, handmade("0B0 0F0"), 0, "0B0", ["forward must come before"]),
    (Law.ORDER, handmade("0F0 0W0 0I0"), 0, "0W0", ["I must come before"]),
    (Law.ORDER, handmade("0F0 0B0 0I0"), 0, "0I0", ["backward is already done"]),
    (Law.ORDER, handmade("0F0 0R0 0B0"), 0, "0R0", ["stage 0 does not recompute"]),
    (Law.ORDER, handmade("0F0 0B0", recompute=(Recompute(1.0, early=True),)), 0, "0B0", ["recompute must come before"]),
    (Law.VERSION, handmade("0F0 0B0#1"), 0, "0B0#1", ["reads version 1", "forward read 0"]),
    (Law.VERSION, low("0F0#1 0B0#1 " + END), 0, "0F0#1", ["0param#1", "version 1 of unit 0"]),
    (Law.VERSION, low("0F0 0F1#1 0B0 0B1#1 0S 0U 0S#1 0U#1", flush=False), 0, "0F1#1", ["version 1 of unit 0"]),
    (Law.UNIT, replace(ONEF1B, ties=((0, 0),)), 0, None, ["(0, 0)", "2"]),
    (Law.UNIT, replace(ONEF1B, ties=((0, 5),)), 0, None, ["(0, 5)", "2"]),
    (Law.UNIT, replace(ONEF1B, ties=((1,),)), 0, None, ["(1,)", "2"]),
    (Law.READ, low("0F0 0B0 0S N 0U", "1F0 1B0 1S N 1U"), 0, "0B0", ["0grad0", "worker 0 does not have it"]),
    (Law.READ, low("0F0 0S 0B0 N 0U"), 0, "0S", ["0wgrad0", "worker 0 does not have it"]),
    (Law.READ, low("0F0 0B0 0U 0S N"), 0, "0U", ["0sum~0", "worker 0 does not have it"]),
    (
        Law.READ,
        low("0F0 0act0>1 0act0>1 0grad0<1 0B0 " + END, "0act0<0 0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        0,
        "0act0>1",
        ["sends 0act0", "consumed"],
    ),
    (
        Law.READ,
        low("3act0>1 0F0 0act0>1 0grad0<1 0B0 " + END, "3act0<0 0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        0,
        "3act0>1",
        ["sends 3act0"],
    ),
    (
        Law.COPY,
        replace(ONEF1B, turns=tuple((parse(text), parse("0B1")) for text in ("0F0", "0F1"))),
        0,
        "0F1",
        ["makes 0turn1~1", "worker 0 still holds it"],
    ),
    (
        Law.MESSAGE,
        low("0param~0>1 0F0 0act0>1 0grad0<1 0B0 " + END, "0param~0<0 0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        0,
        "0param~0>1",
        ["0param~0 stays on its worker", "act, grad, turn"],
    ),
    (
        Law.LEFTOVER,
        low("0F0 0act0>1 0grad0<1 0B0 " + END, "0act0<0 1F0 1B0 0grad0>0 1S N 1U", turns=TURNS),
        0,
        "0F0",
        ["makes 1turn0~1", "no worker uses"],
    ),
    (
        Law.DEADLOCK,
        low("0grad0<1 0F0 0act0>1 0B0 " + END, "0act0<0 1F0 1B0 0grad0>0 1S N 1U"),
        0,
        "0grad0<1",
        ["worker 0 at 0grad0<1", "worker 1 at 0act0<0"],
    ),
    (Law.DEADLOCK, low("0F0 0B0 0act0>1 " + END, "1F0 1B0 1S 1U N"), 0, "0act0>1", ["worker 0 at 0act0>1", "worker 1 at N"]),
    (Law.DEADLOCK, handmade("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", microbatches=2), 1, "1F1", ["worker 1", "0act1"]),
    (
        Law.CHANNEL,
        low(
            "0F0 0F1 0act0>1 0act1>1 0grad0<1 0B0 0grad1<1 0B1 " + END,
            "0act1<0 0act0<0 1F0 1F1 1B0 0grad0>0 1B1 0grad1>0 1S N 1U",
            microbatches=2,
        ),
        0,
        "0act0>1",
        ["sends 0act0", "worker 1 receives 0act1"],
    ),
    (
        Law.COLLECTIVE,
        low(
            "0F0 0act0>1 0act1@1<1 1F1@1 1B1@1 0grad1@1>1 0grad0<1 0B0 0S 1S N 0U 1U",
            "0F1@1 0act0<0 0act1@1>0 1F0 1B0 0grad1@1<0 0grad0>0 0B1@1 1S 0S N 0U 1U",
            placement=Placement.mirrored(2),
            microbatches=2,
        ),
        0,
        "0S",
        ["worker 0 at 0S", "worker 1 at 1S"],
    ),
    (Law.ONCE, low("0F0 0B0 0S N 0U", "1F0 1B0 1S 1U", flush=False), 1, "N", ["N is missing on worker 1"]),
    (
        Law.BORDER,
        handmade("0B0 0U", prologue=((parse("0F0"),),), drain=((),), flush=False),
        0,
        "0U",
        ["saved1", "worker 0"],
    ),
]


@pytest.mark.parametrize(
    ("law", "schedule", "worker", "action", "said"), LAWS, ids=[f"{n}-{row[0]}" for n, row in enumerate(LAWS)]
)
def test_every_law_names_the_place_and_the_numbers(
    law: Law, schedule: Schedule, worker: int, action: str | None, said: list[str]
) -> None:
    result = check(schedule)
    assert not result.ok
    assert result.law == law.value, str(result)
    if action is not None:
        assert (result.worker, result.action) == (worker, action), str(result)
    assert all(text in (result.reason or "") for text in said), str(result)


def test_every_law_is_in_the_table() -> None:
    """That of reductions follows from the others for all that a schedule can say; `test_lowered_laws.py` breaks it alone."""
    assert {law for law, *_ in LAWS} == set(Law) - {Law.REDUCTION}


def test_the_handmade_schedules_are_one_step_from_legal() -> None:
    """The table above breaks what is whole here."""
    pair = low("0F0 0act0>1 0grad0<1 0B0 " + END, "0act0<0 1F0 1B0 0grad0>0 1S N 1U")
    for schedule in (handmade("0F0 0B0"), handmade("0F0 0I0 0W0"), low("0F0 0B0 " + END), pair, CHIMERA, ONEF1B):
        assert check(schedule).ok
        assert (oracle.blocking if schedule.lowered else oracle.free)(schedule).legal


def test_a_channel_that_carries_in_an_impossible_order_is_refused() -> None:
    producers = tuple(parse(text) for text in ("0F1", "0F0", "1B0", "1B1"))
    order = tuple(action for action in producers if isinstance(action, Action))
    assert not check(replace(ONEF1B, channels=(ChannelOrder((0, 1), (*order[2:], *order[:2])),))).ok
    assert oracle.free(replace(ONEF1B, channels=(ChannelOrder((0, 1), (*order[2:], *order[:2])),))).legal is False
