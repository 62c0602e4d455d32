"""Measures latency and bandwidth from one rank to another, over the transport that a run would use.

Pairs are measured one after another while all other ranks wait, so that no link is shared. A round trip of a small message gives
the latency. Then messages grow in size and number until they take long enough, and the receiver answers after the last:

    source:  small ->  <- small     large -> large ->           <- small

The bandwidth is the bytes divided by the time beyond that of the small round trip. The first messages of a size are not counted,
because buffers are allocated for them.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.ir.action import Kind
from meshwright.runtime.transport.base import Channel, Transport

ROUNDS = 9
"""The number of round trips of small messages. The shortest counts."""
FIRST, LARGEST = 1 << 18, 1 << 22
"""Bytes of the first and of the largest message."""
MOST = 4096
"""The largest number of messages in one repetition."""
LONG_S = 0.15
"""Messages grow until they take this long together."""
REPEATS = 3
KIND = Kind.ACT


class MeasuredPair(NamedTuple):
    """The latency and bandwidth from one rank to another."""

    source: int
    target: int
    latency_s: float
    bytes_per_s: float


def channels(pairs: list[tuple[int, int]]) -> list[Channel]:
    """Returns the channels that measuring these pairs needs, both directions of each."""
    ends = {end for pair in pairs for end in (pair, pair[::-1])}
    return [Channel(source, target, KIND) for source, target in sorted(ends)]


def measure_pair(transport: Transport, rank: int, source: int, target: int, device: torch.device) -> MeasuredPair | None:
    """Measures one pair. Both ranks must call this; the source gets the result, the target None."""
    there, back = Channel(source, target, KIND), Channel(target, source, KIND)
    word = torch.zeros(1, dtype=torch.float64, device=device)
    if rank == target:
        _answer(transport, there, back, word, device)
        return None
    for _ in range(2):
        _round_trip(transport, there, back, word, word)  # opens the connection
    trip = min(_round_trip(transport, there, back, word, word) for _ in range(ROUNDS))
    size, count = FIRST, 1
    while True:
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        _announce(transport, there, back, (size, count), device)
        times = [_round_trip(transport, there, back, message, word, count) for _ in range(REPEATS + 1)]
        took = max(median(times[1:]) - trip, 1e-9)
        if took >= LONG_S or count >= MOST:
            _announce(transport, there, back, (0, 0), device)
            return MeasuredPair(source, target, trip / 2, size * count / took)
        wanted = size * count * min(16.0, max(2.0, 1.25 * LONG_S / took))
        size = min(LARGEST, int(wanted))
        count = min(MOST, -(-int(wanted) // size))


def _round_trip(
    transport: Transport, there: Channel, back: Channel, message: torch.Tensor, word: torch.Tensor, count: int = 1
) -> float:
    start = perf_counter()
    answer = transport.receive(back, word.clone())
    for _ in range(count):
        transport.send(there, message)
    answer.wait()
    transport.flush()
    return perf_counter() - start


def _announce(transport: Transport, there: Channel, back: Channel, next_: tuple[int, int], device: torch.device) -> None:
    """Tells the other rank the size and the number of the next messages; 0 ends the pair."""
    told = torch.tensor(next_, dtype=torch.int64, device=device)
    _round_trip(transport, there, back, told, torch.zeros(1, dtype=torch.float64, device=device))


def _answer(transport: Transport, there: Channel, back: Channel, word: torch.Tensor, device: torch.device) -> None:
    """Runs on the receiver: answers small messages, then announced messages, until a size of 0."""

    def answer(*buffers: torch.Tensor, count: int = 1) -> None:
        first = transport.receive(there, buffers[0])
        for number in range(1, count):  # the next one is posted before this one is waited for
            second = transport.receive(there, buffers[number % len(buffers)])
            first.wait()
            first = second
        first.wait()
        transport.send(back, word)
        transport.flush()

    for _ in range(ROUNDS + 2):
        answer(torch.zeros_like(word))
    while True:
        told = torch.zeros(2, dtype=torch.int64, device=device)
        answer(told)
        size, count = told.tolist()
        if not size:
            return
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(REPEATS + 1):
            answer(*buffers, count=count)


def measure_pairs(transport: Transport, pairs: list[tuple[int, int]], device: torch.device) -> list[MeasuredPair]:
    """Returns the measurements of this rank as a source. All ranks must call this; pairs run one after another."""
    rank, found = dist.get_rank(), []
    for source, target in pairs:
        if rank in (source, target):
            measured = measure_pair(transport, rank, source, target, device)
            if measured is not None:
                found.append(measured)
        dist.barrier()
    return found
