"""Ranks that torchrun has started, on any number of hosts: the process group from the environment, and its watch.

    with attach() as here:
        Engine(schedule, layers, Settings(..., device=here.device)).run(batch)

Each host has its own launcher, which ends the other ranks when it sees one end; so the rank that failed goes first, and
the others wait a little before they follow.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError
from meshwright.runtime import device as devices
from meshwright.runtime.launch.worker_main import ANSWER_S, FOREVER, flush, process_group
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Failure, describe
from meshwright.runtime.watchdog.watchdog import TICK_S, Timeouts, Watch

_LINGER_S = 4.0
_LAST_WORDS_S = 1.5


@dataclass(frozen=True)
class Attached:
    """Where this process stands in a job."""

    rank: int
    world: int
    local_rank: int
    device: torch.device


@contextmanager
def attach(
    *, timeout_s: float = Timeouts.timeout_s, silence_s: float = Timeouts.silence_s, device: str | None = None
) -> Iterator[Attached]:
    """Join the job that the environment names; an error on any rank ends all of them, and the first one is printed."""
    rank, world, local_rank = _number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK", default=0)
    name = f"meshwright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store, watching = _stores(rank)
    name = f"{name}/{store.add(f'{name}/attached/{rank}', 1)}"  # a script may join more than once, all ranks equally often
    board = Board(PrefixStore(f"{name}/watch", watching), world)
    with _Exit(board, rank) as exit_:
        here = Attached(rank, world, local_rank, devices.choose(local_rank, device=device))
        timeouts, alarms = Timeouts(timeout_s, silence_s), {exit_.bell.fileno(): exit_.told_to_stop}
        watch = Watch(board, rank, timeouts, ends=exit_.leave, alarms=alarms, supervised=False)
        faulthandler.enable()
        try:
            with process_group(rank, world, PrefixStore(name, store), local_rank=local_rank):
                yield here
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code and not watch.status.look().action:
                watch.finish()
                raise
            exit_.after_error(watch.fail(error), error)
            raise
        watch.finish()
        _stay_for_others(board, rank, timeout_s)


class _Exit:
    """How a rank ends: on a word of its launcher (SIGTERM), on another's failure, on its own."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.bell, self._wire = socket.socketpair()
        self._stopped_at: float | None = None
        self._before: tuple[int, object] | None = None

    def __enter__(self) -> _Exit:
        ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if ours:
            # A thread that is stuck runs no handler, but the kernel's call of it writes to this file for the one that watches.
            self._wire.setblocking(False)
            self.bell.setblocking(False)
            self._before = signal.set_wakeup_fd(self._wire.fileno(), warn_on_full_buffer=False), signal.SIG_DFL
            signal.signal(signal.SIGTERM, lambda *_: None)
            os.register_at_fork(after_in_child=self._let_go)
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()
        self._wire.close()

    def _let_go(self) -> None:
        if self._before is not None:
            signal.set_wakeup_fd(self._before[0])
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._before = None

    def told_to_stop(self) -> None:
        """The launcher stops this rank, often because it saw another end: find out which, and go in any case."""
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM not in self.bell.recv(64):
                return
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            threading.Timer(_LINGER_S, self._stopped).start()

    def _stopped(self) -> None:
        doing: object = "its store is gone too"
        with contextlib.suppress(RuntimeError):
            doing = self.board.heard(self.rank)
        self._quit(f"stopped by SIGTERM; {doing}", 128 + signal.SIGTERM)

    def leave(self, failure: Failure) -> None:
        """End this process because of a failure, from the thread that watches."""
        if failure.noticed_by == self.rank:
            _print(describe(failure, self.board.last_words(failure, _LAST_WORDS_S)), failure.fix)
        else:
            _print(f"rank {self.rank} stops: {failure}")
        deadline = time.monotonic() + _LINGER_S
        while failure.rank != self.rank and self._stopped_at is None and time.monotonic() < deadline:
            time.sleep(TICK_S / 5)
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in self.bell.recv(64):
                    break
        self._quit("", 2 if failure.clean else 1)

    def after_error(self, first: Failure, error: BaseException) -> None:
        """The main thread raised: say where, or leave quietly if another rank was first."""
        if first.rank == self.rank:
            if not first.clean:
                others = self.board.last_words(first, _LAST_WORDS_S)
                first_line = Failure(**{**first.__dict__, "detail": ""})
                _print(describe(first_line, others), first.fix)
            return
        if first.clean and isinstance(error, MeshwrightError) and error.what == first.what:
            self._quit("", 2)
        self.leave(first)

    def _quit(self, text: str, code: int) -> None:
        if text:
            _print(f"rank {self.rank} {text}")
        flush()
        os._exit(code)


def _print(text: str, fix: str | None = None) -> None:
    """Straight to the file: a stuck thread may hold the stream."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n{f'  try: {fix}' + chr(10) if fix else ''}".encode())


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise MeshwrightError(
            f"{name} is {'not set' if text is None else repr(text)}: this process was not started by torchrun",
            fix="torchrun --nproc-per-node 2 script.py",
        )
    return int(text)


def _hosts_store(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _stores(rank: int) -> tuple[TCPStore, TCPStore]:
    """The store of the job, which the launcher or rank 0 hosts, and a second line to it for the watch."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT")
    hosts = _hosts_store(rank)
    store = TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=FOREVER)
    return store, TCPStore(address, port, is_master=False, timeout=ANSWER_S)


def _stay_for_others(board: Board, rank: int, timeout_s: float) -> None:
    """Who hosts the store goes last."""
    deadline = time.monotonic() + timeout_s
    while _hosts_store(rank) and time.monotonic() < deadline and board.failure() is None:
        if all(doing is not None and doing.over for doing in board.everyone()):
            return
        time.sleep(TICK_S / 5)
