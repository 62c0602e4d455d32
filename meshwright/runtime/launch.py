"""Workers: ranks under torchrun, or local processes that are started once and then given work.

Local workers come out of a server that has torch loaded, so that starting them costs milliseconds. Each piece of work
runs in a process group of its own, of as many ranks as it asks for.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError
from meshwright.runtime import device as devices

TIMEOUT = timedelta(minutes=5)
"""How long a collective waits before it gives up; failures are noticed long before."""


@contextmanager
def process_group(rank: int, world: int, store: Store) -> Iterator[None]:
    """A process group over a store, taken down at the end."""
    device = devices.choose(rank)
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Workers:
    """Local processes, one per rank; `run` gives all of them the same function and returns what each returned."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["meshwright.runtime.preload"])
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.count, self.jobs = count, 0
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.store.port), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """Call `function(*args)` on the first `ranks` workers, each inside the process group; the first error is raised."""
        world = self.count if ranks is None else ranks
        if world > self.count:
            raise MeshwrightError(f"there are {self.count} local workers, {world} are needed", fix=f"Workers({world})")
        self.jobs += 1
        work = pickle.dumps((function, args, world, f"job{self.jobs}"))
        for pipe in self.pipes[:world]:
            pipe.send_bytes(work)
        found: dict[int, Any] = {}
        while len(found) < world:
            ready = wait([pipe for rank, pipe in enumerate(self.pipes[:world]) if rank not in found])
            for rank in [rank for rank, pipe in enumerate(self.pipes[:world]) if pipe in ready]:
                found[rank] = self._answer(rank)
        return [found[rank] for rank in range(world)]

    def _answer(self, rank: int) -> Any:
        try:
            error, result = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(timeout=5)
            code = self.processes[rank].exitcode
            self.close()
            raise MeshwrightError(f"rank {rank} died (exit code {code})") from None
        if error is None:
            return result
        self.close()
        if isinstance(error, MeshwrightError):
            raise error
        raise MeshwrightError(f"rank {rank} failed:\n{error}")

    def close(self) -> None:
        """End all workers."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=5)
        for pipe in self.pipes:
            pipe.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, port: int) -> None:
    """A local worker's life: wait for work, do it, answer."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            function, args, world, name = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        error: Any = None
        result: Any = None
        try:
            with process_group(rank, world, PrefixStore(name, store)):
                result = function(*args)
        except MeshwrightError as found:
            error = found
        except Exception:
            error = traceback.format_exc()
        pipe.send_bytes(pickle.dumps((error, result)))
