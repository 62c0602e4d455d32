"""Parity where rows are few or uneven: widths, halves, short and empty cuts; and where lists meet other transports."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import schedules
from meshwright.train.models import small_models as models
from meshwright.train.verify.rank_differences import RankTrace
from meshwright.train.verify.verify import momentum, rank_trace
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.conftest import Pool
from tests.support.parity import ASYNCHRONOUS, batch, model
from tests.support.thin import thinned


def few(rows: tuple[int, ...], step: int) -> tuple[Tensor, Tensor]:
    """Batches of given sizes."""
    return models.mlp_batch(step, rows=rows[step], width=6)


def traces(pool: Pool, build: Any, data: Any, steps: int = 2, **plan: Any) -> list[RankTrace]:
    """What the ranks of a run saw."""
    from meshwright import Parallel

    case = Case(build, data, Parallel.of(plan), steps, "float64", 0, None, momentum)
    _, _, run = prepare_case(case)
    return pool.run(rank_trace, case, run, ranks=case.parallel.processes)


def same_bits(a: list[RankTrace], b: list[RankTrace]) -> bool:
    """Are gradients, versions, weights and losses of two runs equal on every rank?"""
    return all(
        x.digests == y.digests
        and x.sums == y.sums
        and all(torch.equal(t, y.gradients[u][n]) for u, found in x.gradients.items() for n, t in found.items())
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("width", [(3, 2, 1), (1, 2, 3), (4, 2, 1, 1), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("rows", thinned([9, 4, 27], 3))
@pytest.mark.parametrize("name", ["onef1b", "zero_bubble"])
def test_teams_share_rows(pool: Pool, width: tuple[int, ...], rows: int, name: str) -> None:
    build = partial(model, "mlp", len(width), 0.0)
    found = pool.verify(
        build, partial(few, (rows, rows, rows - 1)), steps=3, pp=len(width), width=width, microbatches=4, schedule=name
    )
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


@pytest.mark.parametrize("recompute", ["inline", "early"])
def test_teams_recompute_and_have_copies(pool: Pool, recompute: str) -> None:
    build = partial(model, "tied", 2, 0.0)
    found = pool.verify(build, partial(batch, "tied", 17), pp=2, width=(3, 1), dp=2, microbatches=4, recompute=recompute, steps=2)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


@pytest.mark.parametrize("name", schedules.names())
def test_a_last_batch_with_fewer_rows_than_microbatches(pool: Pool, name: str) -> None:
    stages = schedules.build(name, workers=4, microbatches=4).stages
    found = pool.verify(
        partial(model, "mlp", stages, 0.0), partial(few, (9, 3, 5, 4)), steps=4, pp=4, microbatches=4, schedule=name
    )
    assert found.passed, (found.max_relative_error, found.worst, found.problems)
    assert name not in ASYNCHRONOUS or found.max_relative_error == 0.0


@pytest.mark.parametrize("half", [False, True])
def test_half_of_a_single_row(pool: Pool, half: bool) -> None:
    options = {"mode": "halving", "half_forward": half}
    plan = {"pp": 4, "microbatches": 8, "schedule": "chimera", "options": options}
    found = pool.verify(partial(model, "mlp", 4, 0.0), partial(few, (9, 8)), steps=2, **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


@pytest.mark.parametrize("name", thinned(schedules.names(), 3))
def test_every_transport_gives_the_same_bits(pool: Pool, name: str) -> None:
    stages = schedules.build(name, workers=4, microbatches=4).stages
    plan = {"pp": 4, "microbatches": 4, "schedule": name}
    first, *others = (
        traces(pool, partial(model, "gpt", stages, 0.1), partial(batch, "gpt", 9), transport=transport, **plan)
        for transport in ("shared", "torch", "strict")
    )
    assert all(same_bits(first, other) for other in others)


def sequence(stages: int) -> torch.nn.Sequential:
    """A Sequential is a list of layers."""
    return torch.nn.Sequential(*models.mlp(layers=stages + 1, width=6))


def named(step: int) -> dict[str, Tensor]:
    """A batch as a mapping; what is no target goes to the first layer by name."""
    x, y = models.mlp_batch(step, rows=8, width=6)
    return {"input": x, "labels": y}


def test_a_sequential_and_a_mapping(pool: Pool) -> None:
    build = partial(torch.nn.Sequential, *[torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)])
    assert pool.verify(build, partial(few, (8, 8)), steps=2, pp=2).passed
    assert pool.verify(partial(plain_layers, 3), named, steps=2, pp=2, microbatches=4).passed


def plain_layers(count: int) -> list[torch.nn.Module]:
    """Linear layers, whose argument is called `input`."""
    return [torch.nn.Linear(6, 6) for _ in range(count)]


def test_any_seed(pool: Pool) -> None:
    losses = {pool.verify(partial(sequence, 2), partial(few, (8,)), steps=1, pp=2, seed=seed).losses for seed in (0, 1)}
    assert len(losses) == 2


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 13, 40])
def test_sixteen_workers_in_teams(rows: int) -> None:
    from meshwright import verify

    plan = {"pp": 4, "width": (8, 4, 3, 1), "microbatches": 4}
    found = verify(partial(model, "tied", 4, 0.0), partial(batch, "tied", rows), plan, steps=2)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)
