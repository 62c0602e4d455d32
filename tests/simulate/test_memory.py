"""Memory over time: every value counted again from spans alone (`ledger.py`), and what peaks follow from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from meshwright import Op, Recompute, StageCost, check, lower, simulate
from meshwright.ir.action import actions
from tests.support.ledger import activations, agree, books, messages, parameters
from tests.support.random_schedules import Case, build, label, named, random_case, random_cluster, random_costs

CLOSE = 1e-9


def without(costs: Sequence[StageCost], *names: str) -> tuple[StageCost, ...]:
    """The same costs with some of them zero."""
    return tuple(replace(cost, **dict.fromkeys(names, 0.0)) for cost in costs)


def seeded(block: int, size: int) -> list[Random]:
    """The random sources of one block of seeds."""
    return [Random(f"memory:{block}:{number}") for number in range(size)]


def count_again(case: Case) -> None:
    """Compare activations and messages of all workers; parameters weigh nothing here."""
    timeline, found = books(case._replace(costs=without(case.costs, "parameter_bytes")))
    for worker, book in enumerate(found):
        agree(timeline, worker, activations(book) + messages(book))


def splits_inside(case: Case) -> bool:
    """Does a split backward have recompute inside?"""
    schedule = lower(case.schedule, costs=case.costs)
    how = schedule.recompute or (Recompute(0.0),) * schedule.stages
    inside = {stage for stage in range(schedule.stages) if how[stage].share > 0 and not how[stage].early}
    return any(a.op is Op.I and a.stage in inside for entries in schedule.lists for entry in entries for a in actions(entry))


@pytest.mark.parametrize("block", range(5))
def test_activations_and_messages_counted_again(block: int) -> None:
    for rng in seeded(block, 60):
        count_again(random_case(rng))


def test_split_backwards_with_recompute_inside_counted_again() -> None:
    tried = [case for rng in seeded(9, 60) if splits_inside(case := random_case(rng))]
    assert len(tried) > 5
    for case in tried:
        count_again(case)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_named_activations_and_messages_counted_again(name: str, options: dict[str, object], recompute: bool) -> None:
    schedule = build(name, options)
    for rng in seeded(10, 3):
        costs = random_costs(rng, schedule.stages, recompute=False)
        costs = tuple(replace(cost, recompute_s=1.0) for cost in costs) if recompute else costs
        count_again(Case(schedule, costs, random_cluster(rng, schedule.workers), "eager", 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100, 150))
def test_activations_and_messages_of_larger_schedules_counted_again(block: int) -> None:
    for rng in seeded(block, 20):
        count_again(random_case(rng, workers=6, stages=7, microbatches=8))


def count_parameters_again(case: Case) -> None:
    """Compare parameters and gradients of all workers; activations and messages weigh nothing here."""
    timeline, found = books(case._replace(costs=without(case.costs, "activation_bytes", "output_bytes", "gradient_bytes")))
    for worker, book in enumerate(found):
        agree(timeline, worker, parameters(book), counted=False)


@pytest.mark.parametrize("sync", ["drawn", "ring"])
def test_parameters_and_gradients_counted_again_on_random_schedules(sync: str) -> None:
    for rng in seeded(20, 60):
        case = random_case(rng)
        count_parameters_again(case if sync == "drawn" else case._replace(sync=sync))


@pytest.mark.parametrize("sync", ["eager", "lazy", "ring"])
@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_parameters_and_gradients_counted_again_on_named_schedules(name: str, options: dict[str, object], sync: str) -> None:
    schedule = build(name, options)
    for rng in seeded(21, 3):
        costs = random_costs(rng, schedule.stages)
        count_parameters_again(Case(schedule, costs, random_cluster(rng, schedule.workers), sync, 0.5))


def test_no_level_is_below_zero_and_time_does_not_run_back() -> None:
    for rng in seeded(22, 80):
        case = random_case(rng)
        timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
        for levels in timeline.memory:
            assert all(first.time_s <= second.time_s for first, second in pairwise(levels))
            assert all(level.bytes >= -CLOSE and level.activations >= -CLOSE for level in levels)


def test_after_a_flush_only_parameters_are_left() -> None:
    for rng in seeded(23, 60):
        case = random_case(rng)
        timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync)
        for worker, levels in enumerate(timeline.memory):
            stages = {stage for _, stage in case.schedule.placement.held[worker]} if levels else set()
            left = levels[-1] if levels else None
            if left is not None:
                assert left.bytes == pytest.approx(sum(case.costs[s].parameter_bytes for s in stages), abs=1e-6)
                assert left.activations == 0


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_peaks_in_time_are_the_peaks_of_the_lists(name: str, options: dict[str, object]) -> None:
    """A worker computes one thing at a time, so costs do not matter for how many activations are alive."""
    schedule = build(name, options)
    verdict = check(schedule)
    for rng in seeded(24, 3):
        costs = [StageCost(*(rng.choice((0.0, rng.uniform(0.5, 2))) for _ in range(3))) for _ in range(schedule.stages)]
        timeline = simulate(schedule, costs, random_cluster(rng, schedule.workers))
        for worker, peak in enumerate(verdict.peak_activations):
            wanted = peak * schedule.workers / schedule.stages / schedule.parts
            assert timeline.peak(worker) == pytest.approx(wanted)


def test_what_takes_no_time_still_takes_room() -> None:
    """Peaks follow from the order of the lists alone, even where every action is free."""
    for name, options in named():
        schedule = build(name, options)
        timeline = simulate(schedule, [StageCost()] * schedule.stages)
        for worker, peak in enumerate(check(schedule).peak_activations):
            wanted = peak * schedule.workers / schedule.stages / schedule.parts
            assert timeline.peak(worker) == pytest.approx(wanted), (name, options, worker)
