"""Transports between real processes: order, bits, back pressure, no deadlock, and errors that name the edge."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Kind
from meshwright.ir.plan.plan import parse_name
from meshwright.runtime.transport.base import Channel, Transport
from meshwright.runtime.transport.choose import host_identity, open_transport
from meshwright.runtime.transport.self_test import ping
from meshwright.runtime.transport.torch_distributed import TorchTransport
from tests.support import crew

ACT, GRAD = Channel(0, 1, Kind.ACT), Channel(1, 0, Kind.GRAD)
TURN = Channel(0, 1, Kind.TURN)
PAIR = [ACT, GRAD, TURN]
ASYNCHRONOUS = ["torch", "untagged", "shared"]
ALL = [*ASYNCHRONOUS, "strict"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


def opened(name: str, channels: list[Channel], rank: int) -> Transport:
    if name == "untagged":  # what NCCL gets: one group per channel
        transport = TorchTransport(channels, rank, tagged=False)
        ping(transport, channels, rank, 10.0)
        return transport
    return open_transport(name, channels, rank, start_timeout_s=10.0)


def messages(seed: int, count: int) -> list[Tensor]:
    """Random dtypes and shapes, sizes that grow, some of them empty; all bit patterns occur."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    made = []
    for i in range(count):
        shape = rng.choice([(), (0,), (3, 0, 2), (i + 1,), (2, i + 1), (1 << min(i, 17), 3), (4087 + i % 3,)])
        dtype = rng.choice(DTYPES)
        size = int(torch.tensor(shape).prod()) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
        made.append(raw.view(dtype).reshape(shape))
    return made


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def exchange(rank: int, name: str) -> list[int]:
    """Both directions and two kinds at once, with pauses; the numbers of the messages that came wrong."""
    transport = opened(name, PAIR, rank)
    rng = random.Random(rank)
    wrong = []
    for number, (there, back) in enumerate(zip(messages(1, 40), messages(2, 40), strict=True)):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.01)
        into = torch.empty_like(back if rank == 0 else there)
        if rank == 0:
            transport.send(ACT, there)
            transport.send(TURN, torch.empty(0))
            transport.receive(GRAD, into).wait()
        else:
            receipt = transport.receive(ACT, into)
            transport.receive(TURN, torch.empty(0)).wait()
            receipt.wait()
            transport.send(GRAD, back)
        if not same_bits(into, back if rank == 0 else there):
            wrong.append(number)
    transport.flush()
    transport.close()
    return wrong


@pytest.mark.parametrize("name", ALL)
def test_order_and_bits(name: str) -> None:
    assert crew.run(exchange, 2, name) == [[], []]


def both_ways(rank: int, name: str) -> bool:
    """Both ranks send 12 MB first and receive then; sizes grow, so that slots grow while they are in use."""
    transport = opened(name, PAIR, rank)
    out, into = (ACT, GRAD) if rank == 0 else (GRAD, ACT)
    right = True
    for size in (1 << 12, 1 << 20, 1 << 21):
        first, second = torch.full((size,), rank + 0.5), torch.full((size // 2,), rank + 0.25)
        transport.send(out, first)
        transport.send(out, second)
        got = torch.empty(size), torch.empty(size // 2)
        early, late = transport.receive(into, got[0]), transport.receive(into, got[1])
        late.wait()
        early.wait()
        right = right and bool((got[0] == 1.5 - rank).all() and (got[1] == 1.25 - rank).all())
    transport.flush()
    return right


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_large_messages_cross_without_deadlock(name: str) -> None:
    assert crew.run(both_ways, 2, name) == [True, True]


def grow_behind(rank: int) -> bool:
    """The receiver answers before it has taken what was posted, and the second message needs a larger slot."""
    transport = opened("shared", PAIR, rank)
    small, large, answer = torch.ones(8), torch.ones(1 << 20), torch.ones(2)
    if rank == 0:
        transport.send(ACT, small)
        transport.send(ACT, large)
        transport.receive(GRAD, answer).wait()
    else:
        receipts = [transport.receive(ACT, small), transport.receive(ACT, large)]
        time.sleep(0.05)
        transport.send(GRAD, answer)
        for receipt in receipts:
            receipt.wait()
    return True


def test_growing_does_not_wait_for_the_receiver() -> None:
    assert crew.run(grow_behind, 2) == [True, True]


def post_many(rank: int, name: str) -> list[float]:
    """More receives are posted than a ring has slots, and something sent after them is waited for first."""
    transport = opened(name, PAIR, rank)
    values = [torch.full((1000,), float(i)) for i in range(12)]
    if rank == 0:
        for value in values:
            transport.send(ACT, value)
        transport.send(TURN, torch.empty(0))
        transport.flush()
        return []
    into = [torch.empty(1000) for _ in values]
    receipts = [transport.receive(ACT, tensor) for tensor in into]
    transport.receive(TURN, torch.empty(0)).wait()
    for receipt in receipts:
        receipt.wait()
    return [float(tensor.mean()) for tensor in into]


@pytest.mark.parametrize("name", ALL)
def test_many_receives_may_be_posted(name: str) -> None:
    assert crew.run(post_many, 2, name)[1] == list(range(12))


def narrow_pipes(rank: int) -> list[float]:
    """Whoever has many pipes gets short ones: what was posted crosses all the same."""
    whole = os.pipe

    def pipe() -> tuple[int, int]:
        reads, writes = whole()
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 2 * mmap.PAGESIZE)
        return reads, writes

    os.pipe = pipe  # a process of its own
    return edges_of_small(rank)


def edges_of_small(rank: int) -> list[float]:
    """Sizes around what goes through a pipe itself; something that is sent after them is waited for first."""
    transport, sizes = opened("shared", PAIR, rank), (4087, 4088, 4089, 0)
    if rank == 0:
        for size in sizes:
            transport.send(ACT, torch.full((size,), size % 100, dtype=torch.uint8))
        transport.send(TURN, torch.empty(0))
        transport.receive(GRAD, torch.empty(1)).wait()
        return []
    into = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    receipts = [transport.receive(ACT, tensor) for tensor in into]
    transport.receive(TURN, torch.empty(0)).wait()
    transport.send(GRAD, torch.zeros(1))
    for receipt in receipts:
        receipt.wait()
    return [float(tensor.unique()) for tensor in into if tensor.numel()]


@pytest.mark.parametrize("work", [edges_of_small, narrow_pipes])
def test_messages_around_the_size_that_fits_into_a_pipe(work: Callable[[int], list[float]]) -> None:
    assert crew.run(work, 2, deadline_s=10.0) == [[], [87.0, 88.0, 89.0]]


def flood(rank: int, name: str) -> tuple[bool, float, int]:
    """150 messages of 1 MB to a receiver that starts late: order, how long the sender took, how much memory it took."""
    transport = opened(name, PAIR, rank)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    right = True
    if rank == 0:
        for i in range(150):
            transport.send(ACT, torch.full((1 << 18,), float(i)))
        transport.flush()
    else:
        time.sleep(0.5)
        into = torch.empty(1 << 18)
        for i in range(150):
            transport.receive(ACT, into).wait()
            right = right and bool((into == i).all())
    took = time.monotonic() - start
    return right, took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("name", ["torch", "shared"])
def test_a_fast_sender_is_held_back(name: str) -> None:
    (_, took_s, grown_kb), (right, _, _) = crew.run(flood, 2, name)
    assert right
    assert took_s > 0.4, "the sender ran ahead of its receiver"
    assert grown_kb < 48 << 10, "150 MB were sent"


def wrong_order(rank: int, name: str) -> list[float]:
    transport = opened(name, PAIR, rank)
    act, turn = torch.tensor([1.0]), torch.tensor([2.0])
    if rank == 0:
        transport.send(ACT, act)
        transport.send(TURN, turn)
        transport.flush()
        return []
    into = torch.zeros(1), torch.zeros(1)
    later = transport.receive(TURN, into[1])
    transport.receive(ACT, into[0]).wait()
    later.wait()
    return [float(into[0]), float(into[1])]


@pytest.mark.parametrize("name", ALL)
def test_only_strict_minds_the_order_of_kinds(name: str) -> None:
    results = crew.run(wrong_order, 2, name)
    if name == "strict":
        assert all("sent act of 4 bytes" in text and "expects turn of 4 bytes" in text for text in results)
    else:
        assert results == [[], [1.0, 2.0]]


def chosen(rank: int, name: str, homes: list[str]) -> str:
    import meshwright.runtime.transport.choose as choose

    choose.host_identity = lambda: homes[rank]  # stands for a second machine
    return type(open_transport(name, PAIR, rank, start_timeout_s=5.0)).__name__


def test_auto_takes_shared_memory_on_one_host_only() -> None:
    assert host_identity() == host_identity() != ""
    assert crew.run(chosen, 2, "auto", ["a 1 2", "a 1 2"]) == ["SharedTransport"] * 2
    assert crew.run(chosen, 2, "auto", ["a 1 2", "b 3 4"]) == ["TorchTransport"] * 2
    for text in crew.run(chosen, 2, "shared", ["a 1 2", "b 3 4"]):
        assert "needs all ranks on one Linux host, got a, b" in text


def test_names_are_checked() -> None:
    with pytest.raises(MeshwrightError, match="'smoke' is not a transport\n  try: one of auto, torch, shared, strict"):
        parse_name("smoke")
    with pytest.raises(MeshwrightError, match="for CPU tensors"):
        open_transport("shared", PAIR, 0, device=torch.device("cuda"))


def leaves_nothing(rank: int) -> Any:
    before = len(os.listdir("/proc/self/fd"))
    transport = opened("shared", PAIR, rank)
    transport.close()
    return len(os.listdir("/proc/self/fd")) - before


def test_close_gives_files_back() -> None:
    assert crew.run(leaves_nothing, 2) == [0, 0]
