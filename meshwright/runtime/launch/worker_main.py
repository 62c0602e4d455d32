"""The life of a local worker: wait for work, do it, answer; end with the parent, and at once where another rank failed."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError
from meshwright.runtime import device as devices
from meshwright.runtime.launch.shared_tensors import Lending, unpack
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Failure
from meshwright.runtime.watchdog.status import Seat
from meshwright.runtime.watchdog.watchdog import Timeouts, Watch

LEFT = 77
"""The exit code of a worker that ends because it knows of a failure."""

UNGUARDED = 78
"""The exit code of a worker whose import of the user's script came to start workers."""

MARK = "MESHWRIGHT_WORKER"
"""Set in the environment of a worker that has begun to serve."""

ANSWER_S = timedelta(seconds=60)
"""How long a store may take to answer a watcher."""

FOREVER = timedelta(days=7)
"""The limit of torch's own waits: whether a wait is too long is decided by those who see all ranks."""


@contextmanager
def process_group(rank: int, world: int, store: Store, *, local_rank: int | None = None) -> Iterator[None]:
    """A process group over a store, taken down at the end; after an error others may never come to that, so it is left."""
    device = devices.choose(rank if local_rank is None else local_rank)
    before = sys.excepthook
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=world, timeout=FOREVER)
    names_its_rank = sys.excepthook
    if store.add("joined", 1) == world:
        store.set("all joined", "yes")
    yield
    store.wait(["all joined"])  # who closes its connections while others still make theirs would fail them
    dist.destroy_process_group()
    if sys.excepthook is names_its_rank:  # torch leaves it, and a later error would name its rank once per group
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
    """Do what comes through the pipe until it is closed."""
    os.environ.update(environment)
    os.environ[MARK] = str(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and decides
    faulthandler.enable()
    store, watching = _connected(pipe, port), _connected(pipe, port)
    watching.set_timeout(ANSWER_S)
    while True:
        try:
            work, name, world = pipe.recv()
            file = handed_over(pipe)
        except (EOFError, ConnectionError):
            return
        board = Board(PrefixStore(f"{name}/watch", watching), world, secret=secret + name.encode())
        alarms = {pipe.fileno(): leave}
        watch = Watch(board, rank, timeouts, ends=leave, alarms=alarms, supervised=True, seat=seat)
        lending = Lending()
        try:
            function, args = _unpack(work, file)
            del work
            with process_group(rank, world, PrefixStore(name, store)):
                result = function(*args)
            del function, args
            answer = lending.pack(result, "what a worker returned cannot be sent", "return plain data or tensors")
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
    """The store of the parent; where that has ended in the meantime, nobody waits for it."""
    parent = select.poll()
    parent.register(pipe.fileno(), 0)  # its end alone
    deadline = time.monotonic() + ANSWER_S.total_seconds()
    while True:
        if parent.poll(0):
            leave()
        try:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        except (DistNetworkError, DistStoreError):
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(dist.default_pg_timeout)
            return store


def leave(_: Failure | None = None) -> NoReturn:
    """End this process, from any thread, without asking those that are stuck; the parent tells the user why."""
    flush()
    os._exit(LEFT)


def flush() -> None:
    """Write out what was printed, unless a stuck thread holds the stream."""
    thread = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    thread.start()
    thread.join(timeout=0.2)


def hand_over(pipe: Connection, file: int | None) -> None:
    """Send an open file, or that there is none."""
    pipe.send_bytes(b"-" if file is None else b"+")
    if file is not None:
        send_handle(pipe, file, None)


def handed_over(pipe: Connection) -> int | None:
    """Receive what was handed over."""
    return recv_handle(pipe) if pipe.recv_bytes() == b"+" else None


def _unpack(work: bytes, file: int | None) -> tuple[Any, Any]:
    try:
        return unpack(work, file)
    except (AttributeError, ImportError) as error:
        raise MeshwrightError(
            f"a worker cannot find what it is to run: {error}",
            fix="define it in a file that can be imported; an interactive session or `python -c` is none",
        ) from error
