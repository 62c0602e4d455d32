"""Receive buffers are made just in time: how many wait unread depends on their size, never on the number of microbatches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.plan.plan import Parallel
from meshwright.passes.messages import OUTSTANDING
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.executor.executor import WINDOW_BYTES
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.transport.base import Channel
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool

WIDTH = 256


class Counted:
    """A receipt that tells when it was waited for."""

    def __init__(self, receipt: Any, live: Counter[Channel], channel: Channel, size: int) -> None:
        self.receipt, self.live, self.channel, self.size = receipt, live, channel, size

    def wait(self) -> None:
        self.receipt.wait()
        self.live[self.channel] -= self.size


def peaks(parallel: Parallel, rows: int) -> tuple[int, int]:
    """The most bytes and messages posted and unread on any channel, after the walk in which shapes are agreed."""
    torch.manual_seed(0)
    layers = Layers.of([nn.Linear(WIDTH, WIDTH) for _ in range(parallel.pp)], parallel.pp)
    engine = Engine(
        lists_for(parallel), layers, Settings(optimizer=momentum, microbatches=parallel.microbatches, transport="torch")
    )

    def batch(_: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows * parallel.microbatches, WIDTH)
        return x, x

    engine.run(batch)
    live: Counter[Channel] = Counter()
    count: Counter[Channel] = Counter()
    most = [0, 0]
    receive = engine.transport.receive

    def counted(channel: Channel, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        live[channel] += size
        most[0] = max(most[0], live[channel])
        most[1] = max(most[1], live[channel] // size)
        return Counted(receive(channel, tensor), live, channel, size)

    engine.transport.receive = counted  # type: ignore[method-assign]
    engine.run(batch)
    assert not any(live.values()) and not count
    engine.close()
    return most[0], most[1]


@pytest.mark.parametrize("name", ["gpipe", "onef1b", "chimera", "zero_bubble"])
def test_large_messages_wait_two_at_a_time(pool: Pool, name: str) -> None:
    rows = WINDOW_BYTES // (WIDTH * 4)
    for microbatches in (4, 16):
        parallel = Parallel(pp=2, schedule=name, microbatches=microbatches)
        for size, number in pool.run(peaks, parallel, rows, ranks=2):
            assert number <= OUTSTANDING and size <= OUTSTANDING * WINDOW_BYTES


def test_small_messages_stay_within_the_window(pool: Pool) -> None:
    for microbatches in (16, 64):
        parallel = Parallel(pp=2, schedule="gpipe", microbatches=microbatches)
        for size, _ in pool.run(peaks, parallel, 4, ranks=2):
            assert 0 < size <= WINDOW_BYTES
