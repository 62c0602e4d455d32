"""Widening: every schedule on a line can be widened, channel orders too; the pieces are those that rows need."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import Cluster, MeshwrightError, Parallel, Placement, StageCost, check, lower, schedules, simulate
from meshwright.ir.action import Kind, Transfer
from meshwright.ir.cluster import Duplex, Link
from meshwright.ir.placement import Rows
from meshwright.ir.schedule import ChannelOrder
from meshwright.passes.widen import widen
from meshwright.train.setup.build_schedule import lists_for

WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(WIDTHS, st.integers(1, 6), st.booleans(), st.sampled_from(Duplex))
def test_a_widened_listed_is_proved_and_sends_on_every_channel_in_its_order(
    widths: list[int], count: int, strict: bool, duplex: Duplex
) -> None:
    costs = [StageCost(1.0 + s, 1.0, 0.5, output_bytes=3.0, gradient_bytes=2.0) for s in range(len(widths))]
    links = Cluster(Link(0.1, 2.0), duplex=duplex)
    narrow = schedules.build("listed", workers=len(widths), microbatches=count, costs=costs, cluster=links, strict=strict)
    wide = widen(narrow, widths)
    lowered = lower(wide)
    assert check(lowered).ok
    orders = defaultdict(list)
    for channel in wide.channels:
        orders[channel.workers].append(channel.producers)
    for stage, (before, after) in enumerate(zip(wide.placement.teams[0], wide.placement.teams[0][1:], strict=False)):
        wanted = [c.producers for c in narrow.channels if c.workers == (stage, stage + 1)]
        assert len(wanted) == (1 if strict or duplex is Duplex.HALF else 2), "one for a link, or for each of its directions"
        for _, source, target in wide.placement.pieces(before[0], after[0]):
            assert orders[source, target] == wanted
            sent = [(e.value.kind, e.value.mb) for e in lowered.lists[source] if isinstance(e, Transfer) and e.peer == target]
            assert len(sent) == sum(map(len, wanted))
            for producers in wanted:
                kinds = [(Kind.ACT if a.op.value == "F" else Kind.GRAD, a.mb) for a in producers]
                assert [message for message in sent if message in kinds] == kinds, "messages cross in the order of the channel"


@settings(deadline=None)
@given(WIDTHS, st.integers(0, 9))
def test_pieces_carry_every_row_once_and_are_remembered(widths: list[int], rows: int) -> None:
    ends = [sum(widths[:k]) for k in range(len(widths) + 1)]
    teams = tuple((tuple(range(a, b)),) for a, b in pairwise(ends))
    placement = Placement((teams,), rows)
    for (source,), (target,) in pairwise(teams):
        found = placement.pieces(source, target)
        assert placement.pieces(source, target) is found or len(source) == len(target) == 1
        whole = Rows(0, placement.shares)
        carried = [
            (row, a, b)
            for p, a, b in found
            for row in (range(*whole.piece(p, len(source), len(target))) if p >= 0 else range(*whole))
        ]
        assert sorted(row for row, *_ in carried) == list(range(placement.shares))
        for row, a, b in carried:
            assert row in range(*whole.cut(source.index(a), len(source))) and row in range(
                *whole.cut(target.index(b), len(target))
            )


def test_an_order_of_one_worker_per_stage_is_widened_too() -> None:
    order = schedules.build("zero_bubble", workers=3, microbatches=4)
    plan = Parallel(order=order, width=(2, 1, 3))
    lists = lists_for(plan)
    assert lists.workers == plan.workers == 6
    by_name = lists_for(Parallel(pp=3, schedule="zero_bubble", width=(2, 1, 3), microbatches=4))
    assert lists.lists == by_name.lists


def test_a_team_takes_as_long_as_its_largest_share() -> None:
    """A stage of two workers has half the rows each: a widened pipeline of equal teams is as fast as one with half the costs."""
    costs = [StageCost(2.0, 2.0, 2.0), StageCost(1.0, 1.0, 1.0)]
    narrow = schedules.build("listed", workers=2, microbatches=5)
    half = [StageCost(1.0, 1.0, 1.0)] * 2
    wide = simulate(widen(narrow, (2, 1)), costs)
    assert wide.makespan_s == pytest.approx(simulate(narrow, half).makespan_s)


def test_what_cannot_be_widened_is_refused() -> None:
    for name in ("chimera", "interleaved", "zbv"):
        with pytest.raises(MeshwrightError, match="cannot be widened"):
            widen(schedules.build(name, workers=4, microbatches=4), (1, 1, 1, 2))
    listed = schedules.build("listed", workers=3, microbatches=2)
    for ends in ((0, 2), (2, 3), (-1, 0)):
        broken = replace(listed, channels=(ChannelOrder(ends, listed.channels[0].producers),))
        with pytest.raises(MeshwrightError, match="does not join two stages in a row"):
            widen(broken, (2, 1, 1))
