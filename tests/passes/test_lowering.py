"""What lowering makes is legal: every schedule, every way to lower it, any number of steps, teams and ties."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import Action, Op, Placement, check, lower, schedules
from tests.support import oracle
from tests.support.cases import Case, cases, flat
from tests.support.mutations import (
    RECOMPUTES,
    SYNCS,
    TINY_COMPARED,
    Mutation,
    agreed,
    built,
    drops,
    refused,
    sample,
    simulation_agrees,
    swaps,
)


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_is_legal_for_the_oracle(name: str) -> None:
    for case in cases(names=[name], every_option=False):
        assert agreed(Mutation("nothing", 0, Action(Op.F, 0, 0), built(case, "plain", 4))), case
        simulation_agrees(built(case, "lowered", 4), str(case))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("case", TINY_COMPARED, ids=str)
def test_every_way_to_lower_is_legal(case: Case, sync: str) -> None:
    schedule = case.build()
    for recompute in RECOMPUTES if schedule.recompute is None else (None,):
        lowered = flat(lower(schedule, sync=sync, recompute=recompute))
        assert agreed(Mutation(f"lower with {sync}, recompute {recompute}", 0, lowered.lists[0][0], lowered))


@pytest.mark.slow
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", schedules.names())
def test_every_way_to_lower_is_legal_at_many_sizes(name: str, sync: str) -> None:
    for case in cases(names=[name]):
        for recompute in RECOMPUTES if case.build().recompute is None else (None,):
            lowered = flat(lower(case.build(), sync=sync, recompute=recompute))
            assert agreed(Mutation(f"{case}: lower with {sync}, {recompute}", 0, lowered.lists[0][0], lowered))


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("name", schedules.names())
def test_any_number_of_steps_lowers(name: str, steps: int) -> None:
    for case in cases((1, 2, 3), (2, 3), names=[name], every_option=False):
        schedule = case.build(steps=steps)
        lowered = lower(schedule)
        assert check(schedule).ok and check(lowered).ok, case
        assert oracle.blocking(flat(lowered)).legal, case
        assert oracle.peaks(lowered) == oracle.peaks(schedule), case


WIDE = Placement(((((0, 1, 2),), ((3, 4),), ((5,),)),))
LINE = schedules.build("onef1b", workers=3, microbatches=3)


@pytest.mark.parametrize("rows", [0, 1, 5, 6])
@pytest.mark.parametrize("sync", ["lazy", "eager"])
def test_teams_and_ties_are_legal_for_the_oracle(rows: int, sync: str) -> None:
    period = tuple(LINE.period[stage] for stage in (0, 0, 0, 1, 1, 2))
    schedule = replace(LINE, placement=replace(WIDE, rows=rows), period=period, ties=((0, 2), (1, 2)))
    lowered = flat(lower(schedule, sync=sync))
    assert check(schedule).ok and check(lowered).ok
    assert oracle.blocking(lowered).legal and oracle.free(schedule).legal
    for mutation in sample(drops(lowered), 30, "drop"):
        refused(mutation)
    for mutation in sample(swaps(lowered), 30, "swap"):
        assert check(mutation.schedule).ok == oracle.blocking(mutation.schedule).legal, mutation
