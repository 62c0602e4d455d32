"""What `verify` counts on real runs: messages, turns, bytes and collectives equal closed forms; live activations have a bound."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import Parallel, even_costs, schedules, simulate
from meshwright.ir.analysis.timeline_counts import live_activations, live_activations_max, stage_messages_per_step
from meshwright.runtime.emulate.emulate import emulate
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.tracing.counted_run import RankCounts
from meshwright.train.models.small_models import mlp, mlp_batch
from meshwright.train.prepared import PreparedRun
from meshwright.train.verify.verify import momentum
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.conftest import Pool
from tests.support.command import meshwright
from tests.support.emulation import named
from tests.support.thin import slow

STEPS = 3
BUILD, BATCH = partial(mlp, layers=12, width=4), partial(mlp_batch, rows=12, width=4)
BUFFERS = 8 * 12 * (4 * 4 + 4)
"""Bytes of all gradients in float64. Each parameter adds a number, and each stage two: what was reached, weight, divided."""


def buffer_bytes(stages: int) -> int:
    return BUFFERS + 8 * (2 * 12 + 2 * stages)


CYCLIC = [(2, "v2"), slow((2, "v1"), several=True), slow((3, "v2"), several=True), slow((3, "v1"), several=True)]
CYCLIC += [slow((4, "v2"), several=True), slow((4, "v1"), several=True)]


@pytest.mark.parametrize(("n", "rule"), CYCLIC)
def test_counts_of_cyclic_runs_are_the_closed_forms(pool: Pool, n: int, rule: str) -> None:
    found = pool.verify(BUILD, BATCH, dp=n, dp_mode="cyclic", options={"rule": rule}, steps=STEPS)
    assert found.passed and found.max_relative_error == 0.0
    assert found.rounds == STEPS
    assert found.stage_messages == 2 * n * (n - 1) * STEPS
    assert found.stage_messages_per_step == 1
    assert found.turns == (n - 1) * (2 * n * STEPS - n + 1)
    assert found.bytes_per_round == 2 * (n - 1) * buffer_bytes(n)
    assert (found.collectives, found.collective_bytes_per_round) == (0, 0)
    assert n <= found.live_activations_max <= n * (n + 1) // 2
    written = json.loads(found.to_json())
    assert written["stage_messages"] == found.stage_messages and written["collectives"] == 0


@pytest.mark.parametrize(
    ("plan", "collectives", "words"),
    [
        ({"dp": 2, "dp_mode": "zero-1"}, 3, 3),
        slow(({"dp": 2}, 1, 1), several=True),
        slow(({"dp": 2, "transport": "torch"}, 1, 1), several=True),
        slow(({"dp": 2, "microbatches": 2, "dp_mode": "zero-2"}, 4, 4), several=True),
        slow(({"dp": 2, "dp_mode": "zero-3", "options": {"chunks": 3}}, 3 * 2 + 2 + 3, 4), several=True),
    ],
    ids=str,
)
def test_collectives_of_other_modes(pool: Pool, plan: dict[str, Any], collectives: int, words: int) -> None:
    """zero-1: a reduce-scatter, an all-gather, and the sum of what was reached. zero-3 gathers its last stage once."""
    found = pool.verify(BUILD, BATCH, **{"microbatches": 1, **plan}, steps=STEPS)
    assert found.passed and found.collectives == collectives * STEPS
    assert (found.stage_messages, found.turns, found.bytes_per_round) == (0, 0, 0)
    assert found.collective_bytes_per_round <= words * buffer_bytes(3)


def test_pipelines_send_activations(pool: Pool) -> None:
    found = pool.verify(BUILD, BATCH, pp=2, microbatches=3, steps=STEPS)
    assert (found.stage_messages, found.collectives) == (0, 0)
    assert found.bytes_per_round == 2 * 12 * 4 * 8, "activations of 12 rows and their gradients"
    assert 1 <= found.live_activations_max <= 2 + 1, "1F1B: two on the first stage, one on the last"


def seen(case: Case, run: PreparedRun) -> tuple[int, int]:
    """On a rank: the collectives of a step as they are counted, and as the profiler of torch sees them."""
    counts = RankCounts()
    engine = Engine(run.schedule, run.open(case.model()), run.settings(optimizer=momentum), counts=counts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.run(case.data, 0)
    engine.close()
    calls = [e.name for e in profile.events() if e.name.startswith("c10d::") and "send" not in e.name and "recv" not in e.name]
    return counts.collectives, len(calls) if dist.get_rank() == 0 else 0


@pytest.mark.parametrize("mode", ["zero-1", slow("zero-3"), slow("cyclic")])
def test_the_profiler_of_torch_sees_the_same_collectives(pool: Pool, mode: str) -> None:
    parallel = Parallel(dp=2, dp_mode=mode, transport="torch", microbatches=0 if mode == "cyclic" else 1)
    case, _, run = prepare_case(Case(BUILD, BATCH, parallel, 1, "float64", 0, None, momentum))
    (counted, calls), (other, _) = pool.run(seen, case, run, ranks=2)
    assert counted == calls and other == 0 and (counted > 0) == (mode != "cyclic")


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_live_activations_of_the_model_are_the_closed_form(n: int) -> None:
    costs = even_costs(stages=n, workers=n, forward_s=1.0, backward_s=1.0)
    timeline = simulate(schedules.build("cyclic", workers=n, microbatches=n, steps=4), costs)
    after = dict(live_activations(timeline))  # after all changes of a time step
    assert {after[step] for step in range(2 * (n - 1), 8 * n)} == {n * (n + 1) // 2} == {live_activations_max(timeline)}
    assert stage_messages_per_step(timeline, 4) == 1


@pytest.mark.parametrize("n", [3, slow(4), slow(6)])
def test_live_activations_on_the_stamped_clock(n: int, workers: Workers) -> None:
    job, predicted = named("cyclic", workers=n, microbatches=n, steps=3, forward=n * 1e-3, backward=n * 1e-3)
    [measured] = emulate([job], repeat=1, workers=workers)
    assert measured.modelled is not None
    assert live_activations_max(measured.modelled) == n * (n + 1) // 2
    assert measured.modelled.makespan_s == pytest.approx(predicted, rel=1e-6)


@pytest.mark.slow
def test_the_verb_writes_the_counts() -> None:
    done = meshwright("verify", "mlp", "--dp", "2", "--dp-mode", "cyclic", "--steps", "2", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["stage_messages"] == 2 * 2 * 2 and found["collectives"] == 0
    assert {"turns", "bytes_per_round", "live_activations_max"} <= set(found)
