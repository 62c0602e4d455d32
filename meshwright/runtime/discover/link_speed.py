"""Latency and bandwidth from one rank to another, over the transport that a run would use.

Ranks are measured one pair after the other, while all others wait, so that no link is divided. A round trip of a small message
gives the latency. Then messages grow until one takes long enough, and the receiver answers when it has all of it:

    source:  small ->  <- small     large ->           <- small      bytes per second = large / (round trip - small round trip)
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
"""Round trips of small messages; the shortest counts, others are disturbed."""
FIRST, LARGEST = 1 << 18, 1 << 28
"""Bytes of the first and of the largest message."""
LONG_S = 0.15
"""A message that takes this long is long enough."""
REPEATS = 3
KIND = Kind.ACT


class Pair(NamedTuple):
    """What was measured from one rank to another."""

    source: int
    target: int
    latency_s: float
    bytes_per_s: float


def channels(pairs: list[tuple[int, int]]) -> list[Channel]:
    """Returns the channels that measuring these pairs needs, both directions of each."""
    ends = {end for pair in pairs for end in (pair, pair[::-1])}
    return [Channel(source, target, KIND) for source, target in sorted(ends)]


def measure_pair(transport: Transport, rank: int, source: int, target: int, device: torch.device) -> Pair | None:
    """Measures one pair. The two ranks call this together; the result is on the source, None on the other."""
    there, back = Channel(source, target, KIND), Channel(target, source, KIND)
    word = torch.zeros(1, dtype=torch.float64, device=device)
    if rank == target:
        _answer(transport, there, back, word, device)
        return None
    for _ in range(2):
        _round_trip(transport, there, back, word, word)  # opens the connection
    trip = min(_round_trip(transport, there, back, word, word) for _ in range(ROUNDS))
    size = FIRST
    while True:
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        _announce(transport, there, back, size, device)
        found = median(_round_trip(transport, there, back, message, word) for _ in range(REPEATS))
        if found - trip >= LONG_S or size >= LARGEST:
            _announce(transport, there, back, 0, device)
            return Pair(source, target, trip / 2, size / max(found - trip, 1e-9))
        wanted = size * LONG_S * 1.25 / max(found - trip, 1e-9)
        size = min(LARGEST, max(2 * size, int(min(wanted, 16 * size))))


def _round_trip(transport: Transport, there: Channel, back: Channel, message: torch.Tensor, word: torch.Tensor) -> float:
    start = perf_counter()
    answer = transport.receive(back, word.clone())
    transport.send(there, message)
    answer.wait()
    transport.flush()
    return perf_counter() - start


def _announce(transport: Transport, there: Channel, back: Channel, size: int, device: torch.device) -> None:
    """Tells the other rank the size of the next messages; 0 ends the pair."""
    told = torch.tensor([float(size)], dtype=torch.float64, device=device)
    _round_trip(transport, there, back, told, told)


def _answer(transport: Transport, there: Channel, back: Channel, word: torch.Tensor, device: torch.device) -> None:
    """The receiver's part: small messages, then sizes that are announced, until 0."""

    def answer(message: torch.Tensor) -> None:
        transport.receive(there, message).wait()
        transport.send(back, word)
        transport.flush()

    for _ in range(ROUNDS + 2):
        answer(torch.zeros_like(word))
    while True:
        told = torch.zeros(1, dtype=torch.float64, device=device)
        answer(told)
        if not (size := int(told.item())):
            return
        message = torch.empty(size, dtype=torch.uint8, device=device)
        for _ in range(REPEATS):
            answer(message)


def measure_pairs(transport: Transport, pairs: list[tuple[int, int]], device: torch.device) -> list[Pair]:
    """Returns what this rank measured as a source. All ranks call this together; the pairs follow each other."""
    rank, found = dist.get_rank(), []
    for source, target in pairs:
        if rank in (source, target):
            measured = measure_pair(transport, rank, source, target, device)
            if measured is not None:
                found.append(measured)
        dist.barrier()
    return found
