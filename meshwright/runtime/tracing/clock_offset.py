"""Measure the offset of this host's clock to rank 0's with round trips. The shortest round trip counts.

On one host the offset is 0. It is still measured, because a container may have its own time namespace.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.runtime.json_exchange import all_gather_json
from meshwright.runtime.tracing.clock import Clock, now
from meshwright.runtime.transport.choose import host_identity

ROUNDS = 12
"""Round trips per rank; the shortest one counts."""


def common_clock(device: torch.device | None = None) -> Clock:
    """Returns rank 0's clock on this rank. All ranks call this together, before anything is timed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    homes: list[str] = all_gather_json(host_identity())
    best, offset = float("inf"), 0.0
    for peer in range(1, world):
        if rank == 0:
            _answer(peer, device)
        elif rank == peer:
            best, offset = _ask(device)
    # The measurement is exact to half a round trip. On one host, a smaller offset counts as 0.
    same_host = homes[rank] == homes[0] != ""
    return Clock(0.0 if same_host and abs(offset) <= best / 2 else offset)


def _answer(peer: int, device: torch.device | None) -> None:
    """Rank 0's part: sends its time whenever the peer asks."""
    word = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(ROUNDS):
        dist.recv(word, src=peer)
        word.fill_(now())
        dist.send(word, dst=peer)


def _ask(device: torch.device | None) -> tuple[float, float]:
    """Returns the shortest round trip, and how far rank 0's clock was ahead in the middle of it."""
    word = torch.zeros(1, dtype=torch.float64, device=device)
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        before = now()
        dist.send(word, dst=0)
        dist.recv(word, src=0)
        after = now()
        found.append((after - before, word.item() - (before + after) / 2))
    return min(found)
