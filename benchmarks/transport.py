"""What a message costs: hop time and CPU time of both ends together, ping-pong between two processes.

    python -m benchmarks.transport

Rounds of the transports alternate, so that foreign load hits all alike; medians over rounds. The bar is on CPU time,
which load hardly touches: a message of 1 KB through shared memory costs both ends together less than 25 us.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from meshwright.ir.action import Kind
from meshwright.runtime.transport.base import Channel, Transport
from meshwright.runtime.transport.choose import open_transport

THERE, BACK = Channel(0, 1, Kind.ACT), Channel(1, 0, Kind.GRAD)
NAMES = ("torch", "shared", "strict")
SIZES = {"1 KB": (1 << 10, 400), "1 MB": (1 << 20, 60)}
ROUNDS = 9
BAR_CPU_US = 25.0

Key = tuple[str, str]


def bounce(transport: Transport, rank: int, nbytes: int, count: int) -> tuple[float, float]:
    """Hop and own CPU seconds per message of a ping-pong."""
    out, into = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    first, second = (THERE, BACK) if rank == 0 else (BACK, THERE)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        if rank == 0:
            transport.send(first, out)
            transport.receive(second, into).wait()
        else:
            transport.receive(second, into).wait()
            transport.send(first, out)
    transport.flush()
    return (time.perf_counter() - start) / count / 2, (time.process_time() - cpu) / count / 2


def work(rank: int, folder: str, pipe: Connection) -> None:
    """All rounds on one of the two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    transports = {name: open_transport(name, [THERE, BACK], rank) for name in NAMES}
    seen: dict[Key, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for name, transport in transports.items():
            for size, (nbytes, count) in SIZES.items():
                seen.setdefault((name, size), []).append(bounce(transport, rank, nbytes, count))
    pipe.send(seen)
    dist.barrier()


def main() -> int:
    """Print the table; 1 if the bar is missed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [context.Process(target=work, args=(rank, folder, pipes[rank][1])) for rank in range(2)]
        for process in ranks:
            process.start()
        one, two = [pipe.recv() for pipe, _ in pipes]
        for process in ranks:
            process.join()
    cost_us = {}
    print(f"{'transport':10} {'size':6} {'hop us':>9} {'CPU us, both ends':>18}")
    for key in one:
        hop = statistics.median(hop for hop, _ in one[key])
        cost_us[key] = statistics.median(a + b for (_, a), (_, b) in zip(one[key], two[key], strict=True)) * 1e6
        print(f"{key[0]:10} {key[1]:6} {hop * 1e6:9.1f} {cost_us[key]:18.1f}")
    spent = cost_us["shared", "1 KB"]
    print(f"bar: shared, 1 KB, {spent:.1f} us of CPU, at most {BAR_CPU_US:g}")
    return int(spent > BAR_CPU_US)


if __name__ == "__main__":
    sys.exit(main())
