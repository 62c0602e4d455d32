"""Divided state in the IR: gathers and single sums of every flush schedule are proved, simulated, written and mutated."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from meshwright import Schedule, StageCost, check, even_costs, lower, schedule_from_json, schedule_to_json, schedules, simulate
from meshwright.ir.action import Action, Op
from meshwright.ir.schedule import Sharding
from meshwright.passes.round_laws import gradient_counts

FLUSHED: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {}),
    ("onef1b", {}),
    ("interleaved", {"chunks": 2}),
    ("chimera", {}),
    ("chimera", {"mode": "halving"}),
    ("gems", {}),
    ("zero_bubble", {"variant": "h1"}),
    ("zbv", {}),
    ("dualpipe", {}),
    ("dualpipev", {}),
    ("hanayo", {}),
]
SHARDINGS = [Sharding.STATE, Sharding.GRADIENTS]


def built(name: str, options: dict[str, Any], sharding: Sharding, *, workers: int = 4, microbatches: int = 8) -> Schedule:
    schedule = schedules.build(name, workers=workers, microbatches=microbatches, **options)
    return replace(schedule.repeated(1), sharding=sharding, ties=((0, schedule.stages - 1),))


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("name", "options"), FLUSHED, ids=str)
def test_every_flush_schedule_is_proved(name: str, options: dict[str, Any], sharding: Sharding) -> None:
    plain = lower(built(name, options, Sharding.NONE))
    schedule = lower(built(name, options, sharding))
    assert check(schedule).ok, check(schedule)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule
    costs = even_costs(stages=schedule.stages, workers=schedule.workers)
    assert simulate(schedule, costs).makespan_s == simulate(plain, costs).makespan_s, "free sums and gathers take no time"
    slow = tuple(replace(cost, gather_s=1.0) for cost in costs)
    assert simulate(schedule, slow).makespan_s > simulate(schedule, costs).makespan_s
    wanted = gradient_counts(schedule)
    for worker, entries in enumerate(schedule.lists):
        found = [entry for entry in entries if isinstance(entry, Action)]
        for unit in (u for u, holders in enumerate(schedule.holders) if worker in holders):
            syncs = sum(entry.op is Op.S and entry.stage == unit for entry in found)
            assert syncs == (wanted[unit, 0] if sharding is Sharding.GRADIENTS else 1)
            assert [e.op for e in found if e.stage == unit and e.op in (Op.U, Op.G)] == [Op.U, Op.G]


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("chunks", [2, 3, 6])
def test_divided_parameters_are_gathered_one_action_ahead(chunks: int, microbatches: int) -> None:
    """Each use has its gather, before the action before it; one unit and the next are whole, never more."""
    plain = schedules.build("interleaved", workers=1, microbatches=microbatches, chunks=chunks).repeated(1)
    schedule = lower(replace(plain, sharding=Sharding.PARAMETERS))
    assert check(schedule).ok, check(schedule)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule
    [entries] = schedule.lists
    computed = [i for i, e in enumerate(entries) if isinstance(e, Action) and e.op in (Op.F, Op.B)]
    for before, at in pairwise(computed):
        used, entry = {entries[before].stage}, entries[at]  # type: ignore[union-attr]
        if entry.stage not in used:  # type: ignore[union-attr]
            last = max(i for i in range(at) if getattr(entries[i], "op", None) is Op.G and entries[i].stage == entry.stage)  # type: ignore[union-attr]
            assert last < before, "it runs behind the action before it"
    cost = StageCost(1.0, 1.0, 1.0, parameter_bytes=8.0, optimizer_bytes=16.0)
    peak = simulate(schedule, [cost] * chunks, copies=4).peak_bytes(0)
    assert peak <= chunks * (8 + 8 + 16) / 4 + 2 * 8 + 8, "slices of all, two whole units, one whole gradient"
    whole = simulate(lower(plain), [cost] * chunks).peak_bytes(0)
    assert whole == chunks * 32


@pytest.mark.parametrize("sharding", [*SHARDINGS, Sharding.PARAMETERS])
@pytest.mark.parametrize("seed", range(40))
def test_mutated_gathers_and_sums_are_found(seed: int, sharding: Sharding) -> None:
    """An S or G that is lost, doubled, moved to another worker's place or over another one of its group breaks a law."""
    rng = random.Random(seed)
    name, options = rng.choice(FLUSHED)
    sizes = {"workers": 4, "microbatches": 8}
    if sharding is Sharding.PARAMETERS:
        name, options, sizes = "interleaved", {"chunks": rng.choice([2, 3])}, {"workers": 1, "microbatches": 3}
    schedule = lower(built(name, options, sharding, **sizes))
    worker = rng.randrange(schedule.workers)
    entries = list(schedule.lists[worker])
    places = [i for i, e in enumerate(entries) if isinstance(e, Action) and e.op in (Op.S, Op.G)]
    at = rng.choice(places)
    kinds = ["lost", "doubled", "renamed", "early"]
    if sharding is Sharding.PARAMETERS and entries[at].op is Op.G:  # type: ignore[union-attr]
        kinds = ["doubled", "late"]  # without a gather, the one before serves more actions; an earlier one lives longer
    kind = rng.choice(kinds)
    entry = entries.pop(at)
    assert isinstance(entry, Action)
    if kind == "doubled":
        entries[at:at] = [entry, entry]
    elif kind == "renamed":
        entries.insert(at, entry._replace(stage=entry.stage + 1, version=entry.version))
    elif kind == "early":  # before what it reads
        entries.insert(0, entry)
    elif kind == "late":  # after all uses
        entries.append(entry)
    lists = tuple(tuple(entries) if w == worker else other for w, other in enumerate(schedule.lists))
    assert not check(schedule.with_lists(lists)).ok, (name, options, worker, kind, entry)


def test_single_sums_belong_to_divided_gradients_only() -> None:
    single = lower(built("onef1b", {}, Sharding.GRADIENTS))
    assert "only sharded gradients are summed singly" in str(check(replace(single, sharding=Sharding.STATE)))
    whole = lower(built("onef1b", {}, Sharding.STATE))
    assert "names one of them" in str(check(replace(whole, sharding=Sharding.GRADIENTS)))
    assert "nothing is gathered" in str(check(replace(whole, sharding=Sharding.NONE)))


@pytest.mark.parametrize(("name", "workers"), [("onef1b", 1), ("onef1b", 4), ("chimera", 4)])
@pytest.mark.parametrize("copies", [1, 4])
def test_memory_of_divided_state(name: str, workers: int, copies: int) -> None:
    """Optimizer state by the number of holders; whole gradients or those of one backward, and slices of the sum.

    AdamW has two words for each parameter.
    """
    plain = schedules.build(name, workers=workers, microbatches=4).repeated(1)
    cost = StageCost(1.0, 1.0, 1.0, parameter_bytes=8.0, optimizer_bytes=16.0)

    def peak(sharding: Sharding) -> float:
        found = simulate(replace(plain, sharding=sharding), [cost] * plain.stages, copies=copies)
        return max(found.peak_bytes(worker) for worker in range(workers))

    held = 2 if name == "chimera" else 1  # stages of a worker, and holders of a stage
    assert peak(Sharding.NONE) == held * (8 + 8 + 16)
    assert peak(Sharding.STATE) == held * (8 + 8 + (8 + 16) / (held * copies))
    assert peak(Sharding.GRADIENTS) == held * (8 + (8 + 16) / (held * copies)) + 8
