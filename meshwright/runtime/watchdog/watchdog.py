"""A watchdog thread per rank. It reports the state of its rank to the others, and it finds out which rank failed first.

    every half second   has a rank failed? then end this process, even if its main thread is stuck
                        does the process of the next rank still exist?
    every second        write what this rank does; if no rank has made progress for too long, report the one that blocks

Each rank checks only the next rank that has not finished, so the work per rank does not grow with the number of ranks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.runtime.transport.faults import PeerLost
from meshwright.runtime.watchdog import status as statuses
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Doing, Failure, FailureKind

TICK_S = 0.5
STOPPED_S = 3.0
"""How long a process of this host may be in the stopped state."""


@dataclass(frozen=True)
class Timeouts:
    """How long a job may make no progress (`timeout_s`), and how long a rank of another host may send no heartbeat."""

    timeout_s: float = 300.0
    silence_s: float = 10.0


class Watch:
    """The watchdog of one rank in one job. When a rank has failed, it calls `ends` in its thread, which does not return.

    `alarms` maps open files to the functions to call when they are readable or closed. If `supervised`, a parent notices when
    a process dies.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        timeouts: Timeouts,
        *,
        ends: Callable[[Failure], None],
        alarms: Mapping[int, Callable[[], None]],
        supervised: bool,
        seat: statuses.Seat | None = None,
    ) -> None:
        self.board, self.rank, self.timeouts = board, rank, timeouts
        self.ends, self.alarms, self.supervised = ends, alarms, supervised
        self.status = statuses.begin(rank, seat)
        self._heard = (-1, -1, time.monotonic())
        self._start = time.monotonic()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self.board.say(self.status.look())
        self._thread = threading.Thread(target=self._run, name="meshwright watch", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Reports that the job has finished on this rank."""
        self.status.over = True
        self.close()
        self.board.say(self.status.look())

    def fail(self, error: BaseException) -> Failure:
        """Reports an error on this rank. Returns the first failure of the job, which may be of another rank."""
        before, doing = self.status.seen, self.status.look(last=True)
        self.close()
        if is_secondary(error) and not doing.waits and before.action == doing.action:
            doing = replace(before, beat=doing.beat, last=True)  # report what it waited for before the wait failed
        self.board.say(doing)
        mine = Failure.of(error, doing)
        if is_secondary(error) and (found := self._await_cause()) is not None:
            return found
        return self.board.post(mine)

    def _await_cause(self) -> Failure | None:
        """Waits for the failure that caused a lost connection. Meanwhile this rank keeps checking the next one."""
        deadline = time.monotonic() + self.timeouts.silence_s + 2
        while (found := self.board.await_failure(TICK_S)) is None and time.monotonic() < deadline:
            self._check_next_rank()
        return found

    def close(self) -> None:
        """Ends the thread."""
        self._stop_writer.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._stop_reader.close()

    def _run(self) -> None:
        try:
            ticks = 0
            while not self._sleep_or_stop():
                if (failure := self.board.failure()) is not None:
                    self.board.say(self.status.look(last=True))
                    self.ends(failure)
                    return
                self._check_next_rank()
                ticks += 1
                if ticks % 2 == 0:
                    doing = self.status.look()
                    self.board.say(doing)
                    if doing.still_s >= self.timeouts.timeout_s:
                        self._check_for_hang()
        except RuntimeError as error:  # raised if the store is gone
            doing = self.status.look()
            what = f"lost the store of the job, while {doing}: {str(error).splitlines()[0]}"
            self.ends(Failure.seen(FailureKind.RAISED, what, doing))

    def _sleep_or_stop(self) -> bool:
        """Sleeps for one tick. Returns True if the thread must end."""
        poll = select.poll()
        poll.register(self._stop_reader, select.POLLIN)
        for file in self.alarms:
            poll.register(file, 0 if self.supervised else select.POLLIN)  # only the main thread reads a supervisor's pipe
        before = time.monotonic()
        for file, _ in poll.poll(TICK_S * 1e3):
            if file == self._stop_reader.fileno():
                return True
            self.alarms[file]()
        if time.monotonic() - before > TICK_S + 2:  # this process was suspended, so what it knows about the others is old
            self._heard = (-1, -1, time.monotonic())
        return False

    def _check_next_rank(self) -> None:
        doing = self._next()
        if doing is None:
            return
        rank, beat, since = self._heard
        if (rank, beat) != (doing.rank, doing.beat):
            since = time.monotonic()
            self._heard = (doing.rank, doing.beat, since)
        silent_s = time.monotonic() - since
        if (failure := self._diagnose(doing, silent_s)) is not None:
            first = self.board.post(replace(failure, noticed_by=self.rank))
            # The launcher would wait for a stopped process, and a process that blocks its interpreter cannot end itself.
            if (
                first.rank == doing.rank
                and first.how in (FailureKind.STOPPED, FailureKind.HUNG)
                and statuses.state(doing) not in (None, "X")
            ):
                os.kill(doing.pid, signal.SIGKILL)

    def _next(self) -> Doing | None:
        """Returns the status of the next rank that has not finished; None if that rank has not started or has already failed."""
        members = self.board.members
        here = members.index(self.rank)
        for rank in (*members[here + 1 :], *members[:here]):
            doing = self.board.heard(rank)
            if doing is None or not doing.over:
                return None if doing is None or doing.last else doing
        return None

    def _diagnose(self, doing: Doing, silent_s: float) -> Failure | None:
        match statuses.state(doing):
            case "X":
                return None if self.supervised else Failure.seen(FailureKind.DIED, f"process {doing.pid} is gone", doing)
            case "T" if silent_s > STOPPED_S:
                return Failure.seen(FailureKind.STOPPED, f"process {doing.pid} is stopped (SIGSTOP)", doing)
            case None if silent_s > self.timeouts.silence_s:
                what = f"no heartbeat for {silent_s:.0f} s, its process or its host ({doing.home.split(' ')[0]}) is gone"
                return Failure.seen(FailureKind.DIED, what, doing)
            case None | "T":
                return None
        if silent_s > self.timeouts.timeout_s:
            return Failure.seen(FailureKind.HUNG, f"no heartbeat for {silent_s:.0f} s, its Python interpreter is blocked", doing)
        return None

    def _check_for_hang(self) -> None:
        """Reports a hang if no rank has made progress for too long while a rank waits or walks a schedule.

        The rank to blame is one that waits for no other rank.
        """
        limit = self.timeouts.timeout_s
        everyone = self.board.everyone()
        known = [doing for doing in everyone if doing is not None]
        if len(known) < len(everyone):
            if time.monotonic() - self._start > limit:
                absent = [rank for rank, doing in zip(self.board.members, everyone, strict=True) if doing is None]
                self.board.post(
                    Failure(absent[0], FailureKind.HUNG, f"it has not started within {limit:g} s", noticed_by=self.rank)
                )
            return
        still = all(doing.over or doing.still_s >= limit for doing in known)
        if not still or not any(doing.inside for doing in known):
            return
        blame = [doing for doing in known if not doing.over and not doing.waits]
        if blame:
            worst = max(blame, key=lambda doing: (bool(doing.action), doing.still_s))
            what = f"no progress for {worst.still_s:.0f} s" + (f" at {worst.where}" if worst.where else "")
        else:
            worst = next(doing for doing in known if not doing.over)
            what = f"no progress for {worst.still_s:.0f} s: all ranks wait for each other ({worst.waits})"
        fix = "if the work really takes that long, increase timeout_s"
        self.board.post(Failure.seen(FailureKind.HUNG, what, worst, fix=fix, noticed_by=self.rank))


def is_secondary(error: BaseException) -> bool:
    """Returns whether an error only shows that another rank is gone."""
    if isinstance(error, PeerLost):
        return True
    if isinstance(error, MeshwrightError):
        return "process is gone" in error.what
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("onnection", "gloo", "roken pipe"))
