"""Transports between real processes: order, bits, back pressure, no deadlock, and errors that name the edge."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Kind
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.choose import host_identity, open_transport, parse_name
from meshwright.runtime.transport.ping import Timed, ping
from meshwright.runtime.transport.shared import SharedTransport
from meshwright.runtime.transport.wire import TorchTransport
from tests import crew

ACT, GRAD = Channel(0, 1, Kind.ACT), Channel(1, 0, Kind.GRAD)
TURN = Channel(0, 1, Kind.TURN)
PAIR = [ACT, GRAD, TURN]
ASYNCHRONOUS = ["torch", "untagged", "shared"]
ALL = [*ASYNCHRONOUS, "strict"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


def opened(name: str, channels: list[Channel], rank: int) -> Timed:
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
        shape = rng.choice([(), (0,), (3, 0, 2), (i + 1,), (2, i + 1), (1 << min(i, 17), 3)])
        dtype = rng.choice(DTYPES)
        size = int(torch.tensor(shape).prod()) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
        made.append(raw.view(dtype).reshape(shape))
    return made


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def exchange(rank: int, name: str) -> bool:
    transport = opened(name, PAIR, rank)
    rng = random.Random(rank)
    right = True
    for seed, (there, back) in enumerate(zip(messages(1, 40), messages(2, 40), strict=True)):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.01)
        out, into = (there, torch.empty_like(back)) if rank == 0 else (back, torch.empty_like(there))
        if rank == 0:
            transport.send(ACT, out)
            transport.send(TURN, torch.empty(0))
            transport.receive(GRAD, into).wait()
        else:
            receipt = transport.receive(ACT, into)
            transport.receive(TURN, torch.empty(0)).wait()
            receipt.wait()
            transport.send(GRAD, out)
        right = right and same_bits(into, back if rank == 0 else there), seed
    transport.flush()
    transport.close()
    return bool(right)
