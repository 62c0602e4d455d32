"""Recompute to a byte budget: it holds when simulated, drops no more than needed, and is refused only if nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from meshwright import MeshwrightError, Recompute, Schedule, StageCost, schedules, simulate, stage_aware
from tests.support.random_schedules import build, label, named, random_schedule
from tests.support.thin import thinned

CLOSE = 1e-9


def seeded(block: int, size: int) -> list[Random]:
    """The random sources of one block of seeds."""
    return [Random(f"memory:{block}:{number}") for number in range(size)]


def budget_costs(rng: Random, stages: int, *, outputs: bool, parameters: bool) -> list[StageCost]:
    """Costs without recompute, with sizes for all or some."""
    return [
        StageCost(
            forward_s=rng.uniform(0.5, 2),
            input_s=rng.uniform(0.5, 2),
            weight_s=rng.uniform(0.5, 2),
            sync_s=rng.uniform(0, 1) if parameters else 0.0,
            activation_bytes=rng.uniform(2, 6),
            output_bytes=rng.uniform(0.1, 1) if outputs else 0.0,
            gradient_bytes=rng.uniform(0.1, 1) if outputs else 0.0,
            parameter_bytes=rng.uniform(0.1, 2) if parameters else 0.0,
        )
        for _ in range(stages)
    ]


def peaks(schedule: Schedule, costs: Sequence[StageCost], shares: Sequence[Recompute]) -> list[float]:
    """Simulated peaks with these shares recomputed inside backwards."""
    rows = [replace(cost, recompute_s=cost.forward_s) for cost in costs]
    timeline = simulate(replace(schedule, recompute=tuple(shares)), rows)
    return [timeline.peak_bytes(worker) for worker in range(schedule.workers)]


def undecided() -> list[tuple[str, dict[str, object]]]:
    """The named schedules that leave recompute open."""
    return [(name, options) for name, options in named() if build(name, options).recompute is None]


@pytest.mark.parametrize(("name", "options"), thinned(undecided(), 8, several=True), ids=label)
@pytest.mark.parametrize("sizes", thinned(["all", "activations", "outputs", "parameters"]))
def test_a_budget_holds_when_simulated(name: str, options: dict[str, object], sizes: str) -> None:
    schedule = build(name, options)
    kept = 0
    for rng in seeded(30, 8):
        costs = budget_costs(rng, schedule.stages, outputs=sizes in ("outputs", "all"), parameters=sizes in ("parameters", "all"))
        budget = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages)) * rng.uniform(0.4, 1.1)
        try:
            shares = stage_aware(schedule, costs, budget_bytes=budget)
        except MeshwrightError:
            continue
        assert max(peaks(schedule, costs, shares)) <= budget + CLOSE, [how.share for how in shares]
        kept += 1
    assert kept, "no budget was met"


def test_a_budget_holds_on_random_schedules() -> None:
    for rng in seeded(31, 80):
        schedule = random_schedule(rng, recomputes=False, cells=False)
        costs = budget_costs(rng, schedule.stages, outputs=False, parameters=False)
        budget = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages)) * rng.uniform(0.4, 1.1)
        try:
            shares = stage_aware(schedule, costs, budget_bytes=budget)
        except MeshwrightError:
            continue
        assert max(peaks(schedule, costs, shares)) <= budget + CLOSE


@pytest.mark.parametrize("name", ["gpipe", "onef1b"])
@pytest.mark.parametrize("parameters", [False, True])
def test_a_chain_drops_no_more_than_brute_force(name: str, parameters: bool) -> None:
    """Every stage alone on its worker: the smallest share of a fine grid whose simulated peak fits is the answer."""
    grid = 60
    schedule = schedules.build(name, workers=3, microbatches=4)
    for rng in seeded(32, 4):
        costs = budget_costs(rng, 3, outputs=False, parameters=parameters)
        table = [peaks(schedule, costs, (Recompute(k / grid),) * 3) for k in range(grid + 1)]
        budget = rng.uniform(max(table[grid]), max(table[0]))
        shares = stage_aware(schedule, costs, budget_bytes=budget)
        for stage, how in enumerate(shares):
            least = next(k for k in range(grid + 1) if table[k][stage] <= budget + CLOSE)
            assert (least - 1) / grid - CLOSE <= how.share <= least / grid + CLOSE, (stage, budget)


def test_whole_layers_round_up_to_the_next_layer_and_no_further() -> None:
    """With exact numbers: 10 layers of 1 byte, a budget for every whole layer."""
    schedule = schedules.build("gpipe", workers=1, microbatches=4)
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=10.0)
    table = [peaks(schedule, [cost], [Recompute(k / 10)])[0] for k in range(11)]
    for dropped, budget in enumerate(table):
        shares = stage_aware(schedule, [cost], budget_bytes=budget + CLOSE, layers=[10])
        assert shares[0].share == pytest.approx(dropped / 10), budget


@pytest.mark.parametrize(("name", "options"), undecided(), ids=label)
def test_what_fits_recomputes_nothing(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    for rng in seeded(33, 4):
        costs = budget_costs(rng, schedule.stages, outputs=False, parameters=False)
        fits = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages))
        assert all(how.share == 0 for how in stage_aware(schedule, costs, budget_bytes=fits + CLOSE))


@pytest.mark.parametrize(("name", "options"), thinned(undecided(), 8, several=True), ids=label)
def test_a_larger_budget_never_drops_more(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    rng = Random(name)
    costs = budget_costs(rng, schedule.stages, outputs=True, parameters=True)
    top = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages))
    before: tuple[Recompute, ...] | None = None
    refused_at = 0.0
    for step in range(1, 41):
        try:
            shares = stage_aware(schedule, costs, budget_bytes=2 * top * step / 40)
        except MeshwrightError:
            assert before is None, "a smaller budget was met"
            refused_at = 2 * top * step / 40
            continue
        assert all(0 <= how.share <= 1 and not how.early for how in shares)
        if before is not None:
            assert all(new.share <= old.share + CLOSE for new, old in zip(shares, before, strict=True))
        before = shares
    assert before is not None and all(how.share == 0 for how in before) and refused_at > 0


@pytest.mark.parametrize("name", ["gpipe", "onef1b"])
def test_a_budget_that_cannot_be_met_is_refused_with_the_numbers(name: str) -> None:
    """Full recompute needs inputs, one working set, parameters and gradient; the message says how much, where and of what."""
    schedule = schedules.build(name, workers=2, microbatches=4)
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=10.0, parameter_bytes=3.0)
    with pytest.raises(MeshwrightError) as caught:
        stage_aware(schedule, [cost] * 2, budget_bytes=15.5)
    assert "worker 0" in caught.value.what and "16" in caught.value.what and "15.5" in caught.value.what
    assert caught.value.fix
    assert max(peaks(schedule, [cost] * 2, (Recompute(1.0),) * 2)) > 15.5
    stage_aware(schedule, [cost] * 2, budget_bytes=16.5)


def test_a_budget_is_refused_only_if_full_recompute_does_not_fit() -> None:
    for rng in seeded(34, 60):
        schedule = random_schedule(rng, recomputes=False, cells=False, wide=False)
        costs = budget_costs(rng, schedule.stages, outputs=False, parameters=False)
        least = max(peaks(schedule, costs, (Recompute(1.0),) * schedule.stages))
        chosen = stage_aware(schedule, costs, budget_bytes=least + CLOSE)
        assert max(peaks(schedule, costs, chosen)) <= least + 2 * CLOSE
