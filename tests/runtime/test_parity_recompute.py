"""Recompute happens exactly once per microbatch and layer, and nowhere else; counted, not believed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Parallel
from meshwright.ir.schedule import Schedule
from meshwright.train.prepared import PreparedRun
from meshwright.train.verify.verify import momentum, rank_trace
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.conftest import Pool
from tests.support.parity import batch

CALLS: Counter[tuple[int, int]] = Counter()
"""(layer, start of its random stream) of every forward in this process; a stream belongs to one microbatch."""


class Counted(nn.Module):
    """A linear layer that counts its calls."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Count, and go on."""
        CALLS[self.number, torch.default_generator.initial_seed()] += 1
        return self.inner(x).tanh()


def counted(layers: int) -> list[nn.Module]:
    """Layers that count."""
    return [Counted(number) for number in range(layers)]


def calls_of(case: Case, run: PreparedRun) -> dict[tuple[int, int], int]:
    """How often this rank called which layer on which microbatch."""
    CALLS.clear()
    rank_trace(case, run)
    return dict(CALLS)


def count(pool: Pool, layers: int, **plan: Any) -> tuple[Schedule, dict[int, list[int]]]:
    """For each layer how often it ran for each microbatch of one step."""
    build, data = partial(counted, layers), partial(batch, "mlp", 17)
    case = Case(build, data, Parallel.of(plan), 1, "float64", 0, None, momentum)
    _, _, run = prepare_case(case)
    total: Counter[tuple[int, int]] = Counter()
    for calls in pool.run(calls_of, case, run, ranks=case.parallel.processes):
        total.update(calls)
    found: dict[int, list[int]] = {}
    for (layer, _), times in sorted(total.items()):
        found.setdefault(layer, []).append(times)
    return run.schedule, found


SPLIT = [("zero_bubble", {}), ("zbv", {}), ("dualpipe", {}), ("dualpipev", {}), ("chimera", {"split": True})]
WHOLE = [("onef1b", {}), ("gpipe", {}), ("chimera", {}), ("hanayo", {}), ("pipedream", {}), ("pipedream_2bw", {}), ("cyclic", {})]


@pytest.mark.parametrize(("name", "options"), [*WHOLE, *SPLIT], ids=[name for name, _ in [*WHOLE, *SPLIT]])
@pytest.mark.parametrize("recompute", ["none", "inline", "early"])
def test_once_per_microbatch(pool: Pool, name: str, options: dict[str, object], recompute: str) -> None:
    _, found = count(pool, 10, schedule=name, options=options, pp=4, microbatches=4, recompute=recompute)
    times = 1 if recompute == "none" else 2
    assert found == {layer: [times] * 4 for layer in range(10)}


def test_a_schedule_that_places_recompute_itself(pool: Pool) -> None:
    schedule, found = count(pool, 8, schedule="shifted", pp=4, microbatches=4)
    assert schedule.recompute is not None and schedule.recompute[-1].share == 0
    assert found == {layer: [2 if layer < 6 else 1] * 4 for layer in range(8)}


@pytest.mark.parametrize("name", ["onef1b", "zero_bubble", "chimera"])
def test_a_share_of_each_stage(pool: Pool, name: str) -> None:
    shares = (0.5, 0.0, 1.0, 0.34)
    _, found = count(pool, 12, schedule=name, pp=4, microbatches=4, recompute=shares)
    expected = {3 * stage + i: [2 if i < ceil(3 * share) else 1] * 4 for stage, share in enumerate(shares) for i in range(3)}
    assert found == expected
    plan = {"schedule": name, "pp": 4, "microbatches": 4, "recompute": shares}
    assert pool.verify(partial(counted, 12), partial(batch, "mlp", 17), steps=2, **plan).passed
