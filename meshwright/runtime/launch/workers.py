"""Workers: local processes that are started once and then given work, or ranks that torchrun has started (`attach`).

Local workers come out of a server that has torch loaded, so that starting them costs milliseconds. Each piece of work
runs in a process group of its own, of as many ranks as it asks for. After a failure the next piece gets fresh processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import sys
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

_LAST_WORDS_S = 1.5
_SEAT_BYTES = 256
_NAME = "meshwright worker"

LOCAL = "127.0.0.1"


class Workers:
    """Local processes, one per rank; `run` gives all of them the same function and returns what each returned.

    `timeout_s`: how long a run may stand still, with at least one rank inside a schedule or a collective.
    `preload`: modules to load once for all of them, where these workers are the first of this process.
    """

    def __init__(self, count: int, *, timeout_s: float = Timeouts.timeout_s, preload: Sequence[str] = ()) -> None:
        _refuse_inside_a_worker()
        if not isinstance(count, int) or count < 1:
            raise MeshwrightError(f"there are 1, 2, ... local workers, got {count!r}", fix="Workers(2)")
        if not timeout_s > 0:
            raise MeshwrightError(f"a run may stand still for a time above 0, got timeout_s={timeout_s!r}", fix="timeout_s=300")
        self.count, self.jobs = count, 0
        self.preload = ["meshwright.runtime.preload", *preload]
        self.timeouts = Timeouts(timeout_s=timeout_s)
        self.store: TCPStore | None = None
        self.secret = b""
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.seats: list[Any] = []
        self._start_or_end()

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """Call `function(*args)` on the first `ranks` workers, each inside the process group; the first error is raised."""
        world = self.count if ranks is None else ranks
        if world > self.count:
            raise MeshwrightError(f"there are {self.count} local workers, {world} are needed", fix=f"Workers({world})")
        with Lending() as lending:
            fix = "a function that can be imported by name, plain arguments"
            work = lending.pack((function, args), "this work cannot be sent to workers", fix)
            return self._run(work, lending.file, world)

    def _run(self, work: bytes, file: int | None, world: int) -> list[Any]:
        # A worker at rest writes nothing: a pipe that can be read has been closed by its death.
        if not self.processes or any(pipe.poll() for pipe in self.pipes):
            self.close()
            self._start_or_end()
        self.jobs += 1
        try:
            return self._do(work, file, f"job{self.jobs}", world)
        except BaseException:
            self.close()  # some of them are still at it
            raise

    def close(self) -> None:
        """End all workers; the next run starts new ones."""
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
        """Start all workers, or, where that fails or is interrupted, none."""
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
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise MeshwrightError(
                "the server that local workers are forked from ended while they were started: killed, or by what it loads",
                fix="see whether the machine ran out of memory (dmesg | tail), and start again",
            ) from error

    def _do(self, work: bytes, file: int | None, name: str, world: int) -> list[Any]:
        assert self.store is not None, "workers have a store while they live"
        board = Board(PrefixStore(f"{name}/watch", self.store), world, secret=self.secret + name.encode())
        for pipe, seat in zip(self.pipes[:world], self.seats, strict=False):
            seat.value = b""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death shows at the other end
                pipe.send((work, name, world))
                hand_over(pipe, file)
        del work
        found: dict[int, Any] = {}
        silent = set(range(world))
        while len(found) < world:
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
            if len(found) < world and (failure := board.failure()) is not None:
                raise as_error(self._exact(failure), board.last_words(failure, _LAST_WORDS_S))
        return [found[rank] for rank in range(world)]

    def _note_death(self, rank: int, board: Board) -> None:
        """A worker that ended without an answer: it has told why, or it could not."""
        self.processes[rank].join(timeout=10)
        code = self.processes[rank].exitcode
        if code == UNGUARDED:
            raise MeshwrightError(
                f"{getattr(sys.modules['__main__'], '__file__', 'the script')} starts workers when it is imported, "
                "and workers import it to find its functions",
                fix="put what starts them under `if __name__ == '__main__':`",
            )
        if code == LEFT and board.failure() is not None:
            return
        doing = replace(board.heard(rank) or Doing(rank), action="", stage=None)
        fix = "see whether the machine ran out of memory: dmesg | tail" if code == -signal.SIGKILL else None
        board.post(Failure.seen(FailureKind.DIED, _cause(code), doing, fix=fix))

    def _exact(self, failure: Failure) -> Failure:
        """What a rank that could not speak for itself was last at; what it said before may be a second old."""
        if failure.how not in (FailureKind.DIED, FailureKind.STOPPED) or not (said := self.seats[failure.rank].value):
            return failure
        action, stage = said.decode().rsplit(" ", 1)
        return replace(failure, action=action, stage=int(stage))


def _local_store() -> TCPStore:
    """A store that listens on the loopback interface alone: given an address it would still listen on all."""
    with socket.socket() as door:
        door.bind((LOCAL, 0))
        door.listen()
        port, file = door.getsockname()[1], door.detach()
    return TCPStore(LOCAL, port, is_master=True, wait_for_workers=False, timeout=ANSWER_S, master_listen_fd=file, use_libuv=True)


def _local(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers find around them; gloo too listens on the loopback interface, unless a user has said where."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in {name for _, name in socket.if_nameindex()} else {}
    return {**loopback, **environment}


@contextlib.contextmanager
def _importable_main() -> Iterator[None]:
    """Workers import the script that starts them, by its file; what was typed or piped in has a name but no file."""
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
    """Ctrl-C reaches all processes of a terminal: those that are started here leave it to the one that starts them."""
    resource_tracker.ensure_running()  # starting it would let the signal through again
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
    """A script that starts workers as it is imported would do so in every worker; the parent explains it."""
    if MARK in os.environ:
        raise MeshwrightError("a local worker cannot start local workers", fix="start them in the first process")
    if multiprocessing.current_process().name.startswith(_NAME):
        os._exit(UNGUARDED)
