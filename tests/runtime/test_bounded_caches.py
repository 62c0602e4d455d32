"""Sizes come and go: whatever is kept for a size is bounded, both ends of a channel forget alike, and the results stay right."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.executor import executor
from meshwright.runtime.recent import Recent
from meshwright.runtime.stage import graphs_by_size
from meshwright.runtime.stage.batch import Batch
from meshwright.runtime.stage.graphs_by_size import Graphs
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.transport import send_receive
from meshwright.runtime.transport.send_receive import Incoming, Outgoing
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool
from tests.support.parity import model

LENGTHS = random.Random(0).choices(range(1, 13), k=48)
"""Twelve lengths in no order, each several times."""

FORMS, CONTRACTS = 5, 3


@contextmanager
def room_for(forms: int, contracts: int) -> Iterator[None]:
    """Less is kept in here."""
    before = executor.FORMS, send_receive.CONTRACTS
    executor.FORMS, send_receive.CONTRACTS = forms, contracts
    try:
        yield
    finally:
        executor.FORMS, send_receive.CONTRACTS = before


def ends() -> int:
    """How many ends of channels this process holds, one per channel and shape."""
    gc.collect()
    return sum(type(found) in (Outgoing, Incoming) for found in gc.get_objects())


def sums(plan: Parallel) -> tuple[list[float], int]:
    """The sums of the losses of all batches, and how many ends of channels are held after them."""
    before = ends()
    torch.manual_seed(0)
    layers = Layers.of([layer.double() for layer in model("mlp", 2, 0.0)], 2)
    engine = Engine(lists_for(plan), layers, Settings(momentum, plan.microbatches, transport=plan.transport))
    found = []
    for step, length in enumerate(LENGTHS):
        data = torch.randn(2, 5, length, 6, dtype=torch.float64)
        tallies = engine.run(lambda _, data=data: (data[0], data[1]), step)  # type: ignore[misc]
        found += [float(tally.loss) for tally in tallies.values()]
    held = ends() - before
    engine.close()
    return found, held


def few_and_all(plan: Parallel) -> tuple[list[float], list[float], int, int]:
    """The sums where little is kept and where all of it is, and how much was held either way."""
    with room_for(FORMS, CONTRACTS):
        few, held = sums(plan)
    every, most = sums(plan)
    return few, every, held, most


@pytest.mark.parametrize("transport", ["shared", "torch"])
def test_both_ends_of_a_channel_forget_the_same_contract(pool: Pool, transport: str) -> None:
    plan = Parallel(pp=2, microbatches=4, transport=transport)
    first, last = pool.run(few_and_all, plan, ranks=2)
    assert last[0] == last[1] and len(last[0]) == len(LENGTHS)
    for _, _, held, most in (first, last):
        # one channel each way; a form has two sizes of microbatches at most, and both may be held by a walk alone
        assert 2 * CONTRACTS <= held <= 2 * (2 * FORMS + CONTRACTS) < most


class Every:
    """Layers that take everything."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Nothing is refused."""
        self.asked += 1
        return None


def test_the_graphs_of_the_latest_sizes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_by_size, "SIZES", 8)
    refusal = Every()
    graphs = Graphs(Layers((), (0,), columns=("ids",), refusal=refusal), {}, torch.device("cpu"))

    def choose(length: int) -> int:
        batch = Batch({"ids": torch.zeros(4, length)}, microbatches=2, names=("ids",))
        graphs.choose(batch)
        return batch.graph_for(2)

    assert {choose(length) for length in range(1, 31)} == {0} and refusal.asked == 30
    assert choose(30) == 0 and refusal.asked == 30
    assert choose(1) == 0 and refusal.asked == 31


def test_the_entry_that_was_not_used_for_the_longest_time_goes() -> None:
    found = Recent[str, int](2)
    found["a"], found["b"] = 1, 2
    assert found.get("a") == 1
    found["c"] = 3
    assert (found.get("a"), found.get("b"), found.get("c"), len(found)) == (1, None, 3, 2)
