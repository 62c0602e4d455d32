"""Sums of two processes through memory: the bits of a collective, windows that are not overwritten, and ends that die."""

from __future__ import annotations

import os
import random
import time

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.transport.pair_sum import PairSum
from tests.support import crew

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def drawn(rank: int, round_: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return [torch.randn(1000 * i, generator=generator).to(dtype) for i, dtype in enumerate(DTYPES)]


def sums(rank: int, run_id: str) -> list[list[Tensor]]:
    """Twenty rounds with pauses, so that now one end and now the other is behind; what differs from a collective."""
    pair, rng = PairSum(drawn(rank, 0), rank, 1 - rank, run_id), random.Random(rank)
    wrong = []
    for round_ in range(20):
        mine = drawn(rank, round_)
        started = pair.start(mine)
        time.sleep(rng.choice([0, 0, 0.01]))
        for one in started:
            one.wait()
        time.sleep(rng.choice([0, 0, 0.01]))
        expected = drawn(rank, round_)
        for tensor in expected:
            dist.all_reduce(tensor)
        wrong += [a for a, b in zip(mine, expected, strict=True) if not torch.equal(a, b)]
    pair.close()
    return [wrong]


def test_a_pair_gives_the_bits_of_a_collective() -> None:
    assert crew.run(sums, 2, "bits") == [[[]], [[]]]


def ends_early(rank: int, run_id: str) -> str:
    pair = PairSum(drawn(rank, 0), rank, 1 - rank, run_id)
    started = pair.start(drawn(rank, 0))
    if rank == 0:
        for one in started:
            one.wait()
        pair.close()
        return "done"
    time.sleep(0.3)  # the other has closed by now
    for one in started:
        one.wait()
    return "done"


def test_an_end_that_closes_after_its_last_sum_takes_nothing_from_the_other() -> None:
    assert crew.run(ends_early, 2, "early") == ["done", "done"]


def loss_of_the_other(pair: PairSum) -> tuple[str, bool]:
    """What rank 0 is told of the end that died, and whether soon."""
    begun = time.monotonic()
    try:
        for one in pair.start(drawn(0, 0)):
            one.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun < 5
    return "nothing", False


def dies(rank: int, run_id: str) -> tuple[str, bool]:
    pair = PairSum(drawn(rank, 0), rank, 1 - rank, run_id)
    if rank == 1:
        os._exit(9)
    return loss_of_the_other(pair)


def test_who_waits_for_an_end_that_died_is_told_so() -> None:
    told, killed = crew.run(dies, 2, "dies")
    assert killed is None
    text, soon = told
    assert soon and text.startswith("PeerLost: rank 0 lost rank 1 on channel sum")


def forks(rank: int, run_id: str) -> tuple[str, bool]:
    """A child of the end that dies (a data loader's) outlives it, and must not hide that."""
    pair = PairSum(drawn(rank, 0), rank, 1 - rank, run_id)
    if rank == 1:
        if os.fork() == 0:
            time.sleep(6)
        os._exit(9)
    return loss_of_the_other(pair)


def test_children_do_not_hold_the_ends_open() -> None:
    text, soon = crew.run(forks, 2, "forks")[0]
    assert soon and text.startswith("PeerLost: rank 0 lost rank 1 on channel sum")
