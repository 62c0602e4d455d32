"""Measures what a step of a collective achieves between two ranks: their messages may take another way that is faster.

Two ranks that share memory send messages through it, but their collectives are those of torch.distributed. An all-reduce of n
bytes on two ranks takes 2 a + n / b (`ir/links/collectives.py`): a small one gives the latency a, a large one the bandwidth b.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from meshwright.ir.links.link import Link
from meshwright.runtime.discover.link_speed import MeasuredPair
from meshwright.runtime.json_exchange import all_gather_json

ROUNDS = 9
"""The shortest of so many counts."""
LARGE = 1 << 23
"""Bytes of the large buffer."""
ALIKE = 0.1
"""Below this difference to the bandwidth of messages, collectives have no limit of their own."""


def fastest_pair(homes: Sequence[str], measured: Sequence[MeasuredPair]) -> MeasuredPair:
    """Returns the pair with the highest bandwidth, inside a host if there is one."""
    return max(measured, key=lambda pair: (homes[pair.source] == homes[pair.target], pair.bytes_per_s))


def measure_collective(pair: MeasuredPair, device: torch.device) -> Link:
    """Returns what collectives of a pair achieve where that is less than its messages. All ranks must call this."""
    ends = [pair.source, pair.target]
    group = dist.new_group(ends)
    found = [0.0, 0.0]
    if dist.get_rank() in ends:
        found = [_all_reduce_s(size, group, device) for size in (8, LARGE)]
        dist.destroy_process_group(group)
    small, large = max(all_gather_json(found))
    link = Link(small / 2, LARGE / max(large - small, 1e-9))
    slower = link.bytes_per_s < (1 - ALIKE) * pair.bytes_per_s
    return Link(link.latency_s if link.latency_s > pair.latency_s else 0.0, link.bytes_per_s if slower else float("inf"))


def _all_reduce_s(size: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    buffer = torch.zeros(size // 4, device=device)
    times = []
    for _ in range(ROUNDS + 1):
        start = perf_counter()
        dist.all_reduce(buffer, group=group)
        buffer[0].item()  # a GPU has ended then
        times.append(perf_counter() - start)
    return min(times[1:])
