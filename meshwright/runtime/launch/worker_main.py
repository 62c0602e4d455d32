"""The main loop of a local worker: receive a job, run it, send the result.

A worker exits when its parent ends or another rank fails.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError
from meshwright.runtime import device as devices
from meshwright.runtime import started_ranks
from meshwright.runtime.launch.shared_tensors import Lending, unpack
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Failure
from meshwright.runtime.watchdog.status import Seat
from meshwright.runtime.watchdog.watchdog import Timeouts, Watch

LEFT = 77
"""The exit code of a worker that exits because of a failure that is already reported."""

UNGUARDED = 78
"""The exit code of a worker that would start workers itself when it imports the user's script."""

MARK = "MESHWRIGHT_WORKER"
"""Set in the environment of a worker as soon as it serves."""

ANSWER_S = timedelta(seconds=60)
"""The timeout of the store for requests of a watchdog."""

FOREVER = timedelta(days=7)
"""The timeout of torch's own waits. It is long because the watchdog, which sees all ranks, decides when a wait is too long."""


@contextmanager
def process_group(started: int, members: int | Sequence[int], store: Store, *, local_rank: int | None = None) -> Iterator[None]:
    """Creates a process group over a store, and destroys it at the end.

    `started` is this rank. `members` are the ranks that take part, in order, or their number if they count from 0.

    After an error it is not destroyed, because the other ranks may never reach that point.
    """
    device = devices.choose(started if local_rank is None else local_rank)
    members = range(members) if isinstance(members, int) else members
    before, rank, world = sys.excepthook, members.index(started), len(members)
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=world, timeout=FOREVER)
    names_its_rank = sys.excepthook
    if store.add("joined", 1) == world:
        store.set("all joined", "yes")
    with started_ranks.members(members):
        yield
    store.wait(["all joined"])  # closing earlier would break the connections that others still open
    dist.destroy_process_group()
    if sys.excepthook is names_its_rank:  # torch does not restore it, and a later error would print its rank once per group
        sys.excepthook = before


def serve(
    pipe: Connection,
    rank: int,
    port: int,
    secret: bytes,
    timeouts: Timeouts,
    environment: Mapping[str, str],
    seat: Seat | None = None,
) -> None:
    """Runs jobs from the pipe until it is closed."""
    os.environ.update(environment)
    os.environ[MARK] = str(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
    faulthandler.enable()
    store, watching = _connected(pipe, port), _connected(pipe, port)
    watching.set_timeout(ANSWER_S)
    while True:
        try:
            work, name, members = pipe.recv()
            file = handed_over(pipe)
        except (EOFError, ConnectionError):
            return
        board = Board(PrefixStore(f"{name}/watch", watching), members, secret=secret + name.encode())
        alarms = {pipe.fileno(): leave}
        watch = Watch(board, rank, timeouts, ends=leave, alarms=alarms, supervised=True, seat=seat)
        lending = Lending()
        try:
            function, args = _unpack(work, file)
            del work
            with process_group(rank, members, PrefixStore(name, store)):
                result = function(*args)
            del function, args
            answer = lending.pack(result, "the result of a worker cannot be sent", "return plain data or tensors")
            del result
        except BaseException as error:
            watch.fail(error)
            leave()
        watch.finish()
        with lending:
            pipe.send_bytes(answer)
            hand_over(pipe, lending.file)
        del answer


def _connected(pipe: Connection, port: int) -> TCPStore:
    """Connects to the store of the parent. Exits if the parent has ended."""
    deadline = time.monotonic() + ANSWER_S.total_seconds()
    with _leaving_with_the_parent(pipe):
        while True:
            try:
                store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
            except (DistNetworkError, DistStoreError):
                if time.monotonic() > deadline:
                    raise
            else:
                store.set_timeout(dist.default_pg_timeout)
                return store


@contextmanager
def _leaving_with_the_parent(pipe: Connection) -> Iterator[None]:
    """Watches the pipe in a thread: torch tries to connect for up to a minute, also after the parent has ended."""
    parent, done = select.poll(), threading.Event()
    parent.register(pipe.fileno(), 0)  # reports only that the pipe was closed

    def watch() -> None:
        while not done.is_set():
            if parent.poll(100):
                leave()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def leave(_: Failure | None = None) -> NoReturn:
    """Ends this process from any thread, even if other threads are stuck. The parent reports the reason to the user."""
    flush()
    os._exit(LEFT)


def flush() -> None:
    """Flushes stdout and stderr, unless a stuck thread holds their lock."""
    thread = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    thread.start()
    thread.join(timeout=0.2)


def hand_over(pipe: Connection, file: int | None) -> None:
    """Sends an open file, or a marker that there is none."""
    pipe.send_bytes(b"-" if file is None else b"+")
    if file is not None:
        send_handle(pipe, file, None)


def handed_over(pipe: Connection) -> int | None:
    """Receives an open file, or None."""
    return recv_handle(pipe) if pipe.recv_bytes() == b"+" else None


def _unpack(work: bytes, file: int | None) -> tuple[Any, Any]:
    try:
        return unpack(work, file)
    except (AttributeError, ImportError) as error:
        raise MeshwrightError(
            f"a worker cannot find the function to run: {error}",
            fix="define it in a file that can be imported, not in an interactive session or in `python -c`",
        ) from error
