"""How far this host's clock is from rank 0's: ping-pong, and the round trip that took the least time.

On one host the answer is 0, which is measured all the same: a container may have a time name space of its own.
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
    """Rank 0's clock on this rank; all ranks call this together, before anything is timed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    homes: list[str] = all_gather_json(host_identity())
    best, offset = float("inf"), 0.0
    for peer in range(1, world):
        if rank == 0:
            _answer(peer, device)
        elif rank == peer:
            best, offset = _ask(device)
    # Half a round trip is what the measurement cannot tell apart: on one host that much is no offset.
    same_host = homes[rank] == homes[0] != ""
    return Clock(0.0 if same_host and abs(offset) <= best / 2 else offset)


def _answer(peer: int, device: torch.device | None) -> None:
    """Rank 0's part: say the time whenever the peer asks."""
    word = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(ROUNDS):
        dist.recv(word, src=peer)
        word.fill_(now())
        dist.send(word, dst=peer)


def _ask(device: torch.device | None) -> tuple[float, float]:
    """The shortest round trip, and by how much rank 0's clock was ahead in the middle of it."""
    word = torch.zeros(1, dtype=torch.float64, device=device)
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        before = now()
        dist.send(word, dst=0)
        dist.recv(word, src=0)
        after = now()
        found.append((after - before, word.item() - (before + after) / 2))
    return min(found)
