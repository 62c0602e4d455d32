"""Join a job that torchrun has started, on any number of hosts: process group from the environment, and a watchdog.

    with attach() as here:
        Engine(schedule, layers, Settings(..., device=here.device)).run(batch)

Each host has its own launcher. It stops the other ranks when one of its ranks exits. So the rank that failed exits first, and
the others wait a few seconds before they exit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError
from meshwright.runtime import device as devices
from meshwright.runtime.launch.worker_main import ANSWER_S, FOREVER, flush, process_group
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Failure, FailureKind, describe
from meshwright.runtime.watchdog.watchdog import TICK_S, Timeouts, Watch

_LINGER_S = 4.0  # how long a rank waits before it exits because of another one
_IDLE_DONE = "idle done"
_MEMBERS = "members"
_FINAL_REPORTS_S = 1.5  # how long to wait for the final reports of the other ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attached:
    """The position of this process in a job: its rank, the number of ranks and its device."""

    rank: int
    world: int
    device: torch.device


@contextmanager
def attach(
    *,
    timeout_s: float = Timeouts.timeout_s,
    silence_s: float = Timeouts.silence_s,
    device: str | None = None,
    members: Sequence[int] = (),
) -> Iterator[Attached]:
    """Joins the job that the environment describes. An error on any rank ends all ranks, and the first error is printed.

    `members` are the ranks of the process group, in order; empty means all. On another rank, which is idle, this waits until
    the members have finished, and then ends the process with `SystemExit`.
    """
    rank, world, local_rank = _number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK", default=0)
    members = tuple(members) or tuple(range(world))
    name = f"meshwright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store, watching = _stores(rank)
    name = f"{name}/{store.add(f'{name}/attached/{rank}', 1)}"  # a script may attach several times, the same number on each rank
    board = Board(PrefixStore(f"{name}/watch", watching), members)
    _refuse_other_members(board, rank)
    with _Exit(board, rank) as exit_:
        if rank not in members:
            _wait_idle(board, exit_, world - len(members))
        here = Attached(rank, world, devices.choose(local_rank, device=device))
        timeouts, alarms = Timeouts(timeout_s, silence_s), {exit_.wakeup.fileno(): exit_.on_sigterm}
        watch = Watch(board, rank, timeouts, ends=exit_.leave, alarms=alarms, supervised=False)
        faulthandler.enable()
        try:
            with process_group(rank, members, PrefixStore(name, store), local_rank=local_rank):
                yield here
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code and not watch.status.look().action:
                watch.finish()
                raise
            exit_.after_error(watch.fail(error), error)
            raise
        watch.finish()
        _stay_for_others(board, rank, timeout_s, idle=world - len(members))


class _Exit:
    """Ends a rank: after SIGTERM from its launcher, after a failure of another rank, or after its own failure."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.wakeup, self._wakeup_sender = socket.socketpair()
        self.wakeup.setblocking(False)  # also if no signal ever writes to it: `told_to_stop` looks and never waits
        self._stopped_at: float | None = None
        self._before: tuple[int, object] | None = None

    def __enter__(self) -> _Exit:
        ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if ours:
            # A stuck main thread runs no Python handler, but the C handler still writes to this socket, which the watchdog polls.
            self._wakeup_sender.setblocking(False)
            self._before = signal.set_wakeup_fd(self._wakeup_sender.fileno(), warn_on_full_buffer=False), signal.SIG_DFL
            signal.signal(signal.SIGTERM, lambda *_: None)
            os.register_at_fork(after_in_child=self._restore_signals)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_signals()
        self._wakeup_sender.close()

    def _restore_signals(self) -> None:
        if self._before is not None:
            signal.set_wakeup_fd(self._before[0])
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._before = None

    def told_to_stop(self) -> float | None:
        """Returns how many seconds ago SIGTERM arrived, or None."""
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in self.wakeup.recv(64) and self._stopped_at is None:
                self._stopped_at = time.monotonic()
        return None if self._stopped_at is None else time.monotonic() - self._stopped_at

    def on_sigterm(self) -> None:
        """Handles SIGTERM. The launcher often sends it because another rank exited: wait for that rank's failure, then exit."""
        if self._stopped_at is None and self.told_to_stop() is not None:
            threading.Timer(_LINGER_S, self._stopped).start()

    def _stopped(self) -> None:
        doing: object = "the store of the job is gone too"
        with contextlib.suppress(RuntimeError):
            doing = self.board.heard(self.rank)
        self._quit(f"stopped by SIGTERM; {doing}", 128 + signal.SIGTERM)

    def leave(self, failure: Failure) -> None:
        """Ends this process because of a failure. Called in the watchdog thread."""
        if failure.noticed_by == self.rank:
            _print(describe(failure, self.board.last_words(failure, _FINAL_REPORTS_S)), failure.fix)
        else:
            _print(f"rank {self.rank} stops: {failure}")
        deadline = time.monotonic() + _LINGER_S
        while failure.rank != self.rank and self.told_to_stop() is None and time.monotonic() < deadline:
            time.sleep(TICK_S / 5)
        self._quit("", 2 if failure.clean else 1)

    def after_error(self, first: Failure, error: BaseException) -> None:
        """Handles an exception of the main thread: prints where it happened, or exits if another rank failed first."""
        if first.rank == self.rank:
            if not first.clean:
                others = self.board.last_words(first, _FINAL_REPORTS_S)
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
    """Writes directly to the file descriptor, because a stuck thread may hold the lock of the stream."""
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


def hosts_store(rank: int) -> bool:
    """Returns whether this rank hosts the store of the job, because its launcher does not."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _stores(rank: int) -> tuple[TCPStore, TCPStore]:
    """Connects to the store of the job, which the launcher or rank 0 hosts. The second connection is for the watchdog."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT")
    hosts = hosts_store(rank)
    store = TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=FOREVER)
    return store, TCPStore(address, port, is_master=False, timeout=ANSWER_S)


def _stay_for_others(board: Board, rank: int, timeout_s: float, idle: int) -> None:
    """Waits until all ranks have finished and idle ones have seen it, if this rank hosts the store."""
    deadline = time.monotonic() + timeout_s
    while hosts_store(rank) and time.monotonic() < deadline and board.failure() is None:
        if _all_over(board) and board.store.add(_IDLE_DONE, 0) >= idle:
            return
        time.sleep(TICK_S / 5)


def _refuse_other_members(board: Board, rank: int) -> None:
    """Raises if the ranks of the job have plans with different ranks: one would wait for a rank that is idle in its own plan.

    Ranks compare with the one that comes first, idle ranks too. That one is told through the board of its members.
    """
    mine = json.dumps(board.members)
    entry = board.store.compare_set(_MEMBERS, "", json.dumps([rank, mine])).decode(errors="replace")
    try:
        other, theirs = json.loads(entry)
        members = [int(member) for member in json.loads(theirs)]
    except (ValueError, TypeError, RecursionError):
        return  # no rank of this job wrote it
    if theirs == mine or not members:
        return
    error = MeshwrightError(
        f"ranks have different plans: rank {other} has a plan for the ranks {theirs}, rank {rank} for the ranks {mine}",
        fix="use the same plan file on all ranks",
    )
    named = rank if rank in members else members[0]
    failure = Failure(named, FailureKind.RAISED, error.what, fix=error.fix, clean=True)
    Board(board.store, members).post(failure)
    if hosts_store(rank):
        time.sleep(_LINGER_S)  # others read the failure before the store ends with this process
    raise error


def _all_over(board: Board) -> bool:
    return all(doing is not None and doing.over for doing in board.everyone())


def _wait_idle(board: Board, exit_: _Exit, idle: int) -> NoReturn:
    """Waits until the ranks of the plan have finished, and ends this process: its model and its results would be old ones.

    It ends with an error if a rank of the plan fails, or a while after its launcher has told it to stop: launchers often do that
    because another rank failed, whose failure is read first.
    """
    rank = exit_.rank
    _log.info("rank %d is not in the plan and waits for ranks %s", rank, ", ".join(map(str, board.members)))
    try:
        while not _all_over(board):
            if (failure := board.failure()) is not None:
                _print(f"rank {rank}, which is idle, stops: {failure}")
                time.sleep(_LINGER_S)  # the rank that failed exits first
                raise SystemExit(2 if failure.clean else 1)
            if (exit_.told_to_stop() or 0.0) > _LINGER_S:
                _print(f"rank {rank}, which is idle, stopped by SIGTERM")
                raise SystemExit(128 + signal.SIGTERM)
            time.sleep(TICK_S / 5)
        board.store.add(_IDLE_DONE, 1)
        _stay_for_others(board, rank, Timeouts.timeout_s, idle)
    except RuntimeError as error:  # raised if the store is gone
        _print(f"rank {rank}, which is idle, lost the store of the job: {str(error).splitlines()[0]}")
        raise SystemExit(1) from None
    raise SystemExit(0)
