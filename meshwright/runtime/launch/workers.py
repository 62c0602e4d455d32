"""Local worker processes that are started once and then run jobs. Ranks that torchrun has started use `attach`.

Local workers are forked from a server that has already imported torch, so starting them takes milliseconds. Each job runs in
its own process group, with as many ranks as it needs. After a failure the next job gets new processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError
from meshwright.runtime.launch.shared_tensors import Lending, unpack
from meshwright.runtime.launch.torchrun import Attached, attach
from meshwright.runtime.launch.worker_main import ANSWER_S, LEFT, MARK, UNGUARDED, hand_over, handed_over, process_group, serve
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Doing, Failure, FailureKind, RankFailed, as_error
from meshwright.runtime.watchdog.watchdog import TICK_S, Timeouts

__all__ = ["Attached", "RankFailed", "Timeouts", "Workers", "attach", "process_group"]

_FINAL_REPORTS_S = 1.5  # how long to wait for the final reports of the other ranks
_SERVER_ENDS_S = 5.0  # how long a fork server may take to end after it closed its socket
_SEAT_BYTES = 256
_NAME = "meshwright worker"

LOCAL = "127.0.0.1"


class Workers:
    """Local processes, one per rank. `run` calls the same function on all of them and returns the result of each.

    `timeout_s`: how long a run may make no progress, with at least one rank inside a schedule or a collective.
    `preload`: modules to import once for all workers. It has an effect only for the first workers of this process.
    """

    def __init__(self, count: int, *, timeout_s: float = Timeouts.timeout_s, preload: Sequence[str] = ()) -> None:
        _refuse_inside_a_worker()
        if not isinstance(count, int) or count < 1:
            raise MeshwrightError(
                f"the number of local workers must be an integer of at least 1, got {count!r}", fix="Workers(2)"
            )
        if not timeout_s > 0:
            raise MeshwrightError(f"timeout_s must be above 0 seconds, got {timeout_s!r}", fix="timeout_s=300")
        self.count, self.jobs = count, 0
        self.preload = ["meshwright.runtime.preload", *preload]
        self.timeouts = Timeouts(timeout_s=timeout_s)
        self.store: TCPStore | None = None
        self.secret = b""
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.seats: list[Any] = []
        self._start_or_end()

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | Sequence[int] | None = None) -> list[Any]:
        """Calls `function(*args)` on workers, each inside the process group. Raises the first error.

        `ranks` are these workers, or a number of workers; others stay idle. The results are in ascending order of workers.
        """
        count = self.count if ranks is None else ranks
        members = tuple(range(count)) if isinstance(count, int) else tuple(sorted(count))
        if (world := max(members, default=-1) + 1) > self.count:
            raise MeshwrightError(f"there are {self.count} local workers, but {world} are needed", fix=f"Workers({world})")
        with Lending() as lending:
            fix = "pass a function that can be imported by name, and plain arguments"
            work = lending.pack((function, args), "this job cannot be sent to workers", fix)
            return self._run(work, lending.file, members)

    def _run(self, work: bytes, file: int | None, members: tuple[int, ...]) -> list[Any]:
        # An idle worker writes nothing. If its pipe is readable, the worker has died.
        if not self.processes or any(pipe.poll() for pipe in self.pipes):
            self.close()
            self._start_or_end()
        self.jobs += 1
        try:
            return self._do(work, file, f"job{self.jobs}", members)
        except BaseException:
            self.close()  # some of them may still be running
            raise

    def close(self) -> None:
        """Ends all workers. The next run starts new ones."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=10)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes, self.seats, self.store = [], [], [], None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_or_end(self) -> None:
        """Starts all workers. If that fails or is interrupted, ends those that were started."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self.preload)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.store, self.secret = _local_store(), secrets.token_bytes(32)
        for rank in range(self.count):
            mine, theirs = context.Pipe()
            seat = context.RawArray("c", _SEAT_BYTES)
            given = (theirs, rank, self.store.port, self.secret, self.timeouts, _local(os.environ), seat)
            process = context.Process(target=serve, args=given, daemon=True, name=f"{_NAME} {rank}")
            with _importable_main(), _without_interrupts():
                self._begin(process)
            theirs.close()
            self.pipes.append(mine)
            self.seats.append(seat)
            self.processes.append(process)

    def _begin(self, process: BaseProcess) -> None:
        deadline = time.monotonic() + _SERVER_ENDS_S
        try:
            while True:
                try:
                    return process.start()
                except ConnectionRefusedError:  # an earlier server closed its socket and has not quite ended
                    if self.processes or time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
        except (EOFError, ConnectionError) as error:
            raise MeshwrightError(
                "the server that local workers are forked from ended while they were started: it was killed, or an import failed",
                fix="check whether the machine ran out of memory (dmesg | tail), and start again",
            ) from error

    def _do(self, work: bytes, file: int | None, name: str, members: tuple[int, ...]) -> list[Any]:
        assert self.store is not None, "running workers have a store"
        board = Board(PrefixStore(f"{name}/watch", self.store), members, secret=self.secret + name.encode())
        for rank in members:
            pipe = self.pipes[rank]
            self.seats[rank].value = b""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker has died; the wait below notices it
                pipe.send((work, name, members))
                hand_over(pipe, file)
        del work
        found: dict[int, Any] = {}
        silent = set(members)
        while len(found) < len(members):
            ready = wait([self.pipes[rank] for rank in silent], timeout=TICK_S)
            for rank in [rank for rank in silent if self.pipes[rank] in ready]:
                silent.discard(rank)
                answer: tuple[bytes, int | None] | None = None
                with contextlib.suppress(EOFError, ConnectionResetError):
                    answer = self.pipes[rank].recv_bytes(), handed_over(self.pipes[rank])
                if answer is not None:
                    found[rank] = unpack(*answer)
                else:
                    self._note_death(rank, board)
            if len(found) < len(members) and (failure := board.failure()) is not None:
                raise as_error(self._with_last_instruction(failure), board.last_words(failure, _FINAL_REPORTS_S))
        return [found[rank] for rank in members]

    def _note_death(self, rank: int, board: Board) -> None:
        """Handles a worker that ended without an answer. Posts a failure if the worker could not post one itself."""
        self.processes[rank].join(timeout=10)
        code = self.processes[rank].exitcode
        if code == UNGUARDED:
            raise MeshwrightError(
                f"{getattr(sys.modules['__main__'], '__file__', 'the script')} starts workers when it is imported, "
                "and workers import it to find its functions",
                fix="put the code that starts them under `if __name__ == '__main__':`",
            )
        if code == LEFT and board.failure() is not None:
            return
        doing = replace(board.heard(rank) or Doing(rank), action="", stage=None)
        fix = "check whether the machine ran out of memory: dmesg | tail" if code == -signal.SIGKILL else None
        board.post(Failure.seen(FailureKind.DIED, _cause(code), doing, fix=fix))

    def _with_last_instruction(self, failure: Failure) -> Failure:
        """Adds the last instruction of a rank that could not report it. The rank's own last report may be a second old."""
        if failure.how not in (FailureKind.DIED, FailureKind.STOPPED) or not (said := self.seats[failure.rank].value):
            return failure
        action, place = said.decode().rsplit(" ", 1)
        stage, _, worker = place.partition("@")
        return replace(failure, action=action, stage=int(stage), worker=int(worker) if worker else None)


def _local_store() -> TCPStore:
    """Creates a store that listens only on the loopback interface. Without its own socket it would listen on all interfaces."""
    with socket.socket() as listener:
        listener.bind((LOCAL, 0))
        listener.listen()
        port, file = listener.getsockname()[1], listener.detach()
    return TCPStore(LOCAL, port, is_master=True, wait_for_workers=False, timeout=ANSWER_S, master_listen_fd=file, use_libuv=True)


def _local(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the workers. gloo also uses the loopback interface, unless the user has set another one."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in {name for _, name in socket.if_nameindex()} else {}
    return {**loopback, **environment}


@contextlib.contextmanager
def _importable_main() -> Iterator[None]:
    """Hides the file name of a main module that has no file, such as a piped script: workers would try to import it."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.exists(path):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Blocks Ctrl-C in processes that are started inside. It reaches all processes of a terminal; only the parent handles it."""
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _refuse_inside_a_worker() -> None:
    """Raises inside a worker. If a script starts workers on import, the worker exits here and the parent raises the error."""
    if MARK in os.environ:
        raise MeshwrightError("a local worker cannot start local workers", fix="start them in the main process")
    if multiprocessing.current_process().name.startswith(_NAME):
        os._exit(UNGUARDED)
