"""Real processes for tests: forked from a server that has torch loaded, joined by gloo, with a deadline."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "meshwright.runtime.transport.choose", "pytest"])


def run(function: Callable[..., Any], world: int, *args: Any, deadline_s: float = 60.0) -> list[Any]:
    """What `function(rank, *args)` returns on each rank: its value, its exception as text, or None if it was killed.

    A rank that does not end in time gives "still running" and where each of its threads stands. The deadline is no bar: tests
    that promise a time measure it themselves.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
        crew = [
            CONTEXT.Process(target=_work, args=(pipes[rank][1], folder, rank, world, function, args), daemon=True)
            for rank in range(world)
        ]
        for member, (_, far) in zip(crew, pipes, strict=True):
            member.start()
            far.close()
        try:
            results = _collect([near for near, _ in pipes], deadline_s)
            return [_stacks(crew[rank].pid, folder, rank) if result is _LATE else result for rank, result in enumerate(results)]
        finally:
            for member in crew:
                member.kill()
                member.join()


_LATE = object()


def _stacks(pid: int | None, folder: str, rank: int) -> str:
    """Ask a process that is late where it stands."""
    if pid is None:
        return "still running: never started"
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "still running: the process is gone, but something holds its pipe open"
    time.sleep(0.5)
    file = Path(folder, f"stacks-{rank}")
    return f"still running: {file.read_text() if file.exists() else 'before its first line'}"


def _collect(pipes: list[Connection], deadline_s: float) -> list[Any]:
    results: list[Any] = [_LATE] * len(pipes)
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    end = time.monotonic() + deadline_s
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                results[rank] = pipe.recv()
            except EOFError:
                results[rank] = None
    return results


def _work(pipe: Connection, folder: str, rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, open(f"{folder}/stacks-{rank}", "w"), all_threads=True)  # noqa: SIM115 (stays open)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    store.set(f"joined {rank}", "yes")
    store.wait([f"joined {other}" for other in range(world)])  # an early end would break the connections that others still open
    try:
        result = function(rank, *args)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    pipe.send(result)
    os._exit(0)  # a broken group must not be taken down politely
