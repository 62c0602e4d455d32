"""A thread per rank that tells the others how this one is, and learns from them who failed first.

    every half second   has somebody failed? then this process ends, whatever its main thread is stuck in
                        is the next rank's process still there?
    every second        write what this rank does; where nobody has moved for too long, say who is to blame

Each rank looks after the next one that has not finished, so the work per rank does not grow with their number.
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
"""How long a stopped process of this host may be stopped."""


@dataclass(frozen=True)
class Timeouts:
    """How long a job may stand still (`timeout_s`), and how long a rank of another host may be silent."""

    timeout_s: float = 300.0
    silence_s: float = 10.0


class Watch:
    """Watches one rank of one job. `ends` is called in its thread when somebody failed, and does not return.

    `alarms` are open files and what to do when they are readable or closed. Where `supervised`, somebody else sees deaths.
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
        self._bell, self._stop = socket.socketpair()
        self.board.say(self.status.look())
        self._thread = threading.Thread(target=self._run, name="meshwright watch", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The job is over on this rank."""
        self.status.over = True
        self.close()
        self.board.say(self.status.look())

    def fail(self, error: BaseException) -> Failure:
        """Tell the others of an error on this rank; the first failure of the job, which may be another's."""
        before, doing = self.status.seen, self.status.look(last=True)
        self.close()
        if is_secondary(error) and not doing.waits and before.action == doing.action:
            doing = replace(before, beat=doing.beat, last=True)  # what it waited in, before that failed
        self.board.say(doing)
        mine = Failure.of(error, doing)
        if is_secondary(error) and (found := self._await_cause()) is not None:
            return found
        return self.board.post(mine)

    def _await_cause(self) -> Failure | None:
        """A lost peer has its own reason, which somebody tells soon; meanwhile this rank goes on looking after its own."""
        deadline = time.monotonic() + self.timeouts.silence_s + 2
        while (found := self.board.await_failure(TICK_S)) is None and time.monotonic() < deadline:
            self._look_after_next()
        return found

    def close(self) -> None:
        """End the thread."""
        self._stop.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._bell.close()

    def _run(self) -> None:
        try:
            ticks = 0
            while not self._rang():
                if (failure := self.board.failure()) is not None:
                    self.board.say(self.status.look(last=True))
                    self.ends(failure)
                    return
                self._look_after_next()
                ticks += 1
                if ticks % 2 == 0:
                    doing = self.status.look()
                    self.board.say(doing)
                    if doing.still_s >= self.timeouts.timeout_s:
                        self._look_for_hang()
        except RuntimeError as error:  # what a store that is gone raises
            doing = self.status.look()
            what = f"lost the store of the job, while {doing}: {str(error).splitlines()[0]}"
            self.ends(Failure.seen(FailureKind.RAISED, what, doing))

    def _rang(self) -> bool:
        """Sleep for a tick; whether it is time to go."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for file in self.alarms:
            poll.register(file, 0 if self.supervised else select.POLLIN)  # a supervisor's pipe is not ours to read
        before = time.monotonic()
        for file, _ in poll.poll(TICK_S * 1e3):
            if file == self._bell.fileno():
                return True
            self.alarms[file]()
        if time.monotonic() - before > TICK_S + 2:  # this process slept: what it knows of others is old
            self._heard = (-1, -1, time.monotonic())
        return False

    def _look_after_next(self) -> None:
        doing = self._next()
        if doing is None:
            return
        rank, beat, since = self._heard
        if (rank, beat) != (doing.rank, doing.beat):
            since = time.monotonic()
            self._heard = (doing.rank, doing.beat, since)
        silent_s = time.monotonic() - since
        if (failure := self._verdict(doing, silent_s)) is not None:
            first = self.board.post(replace(failure, noticed_by=self.rank))
            # A stopped process would keep its launcher waiting, and one that holds its interpreter cannot end itself.
            if (
                first.rank == doing.rank
                and first.how in (FailureKind.STOPPED, FailureKind.HUNG)
                and statuses.state(doing) not in (None, "X")
            ):
                os.kill(doing.pid, signal.SIGKILL)

    def _next(self) -> Doing | None:
        """The next rank that has not finished; None before it has begun."""
        for step in range(1, self.board.world):
            doing = self.board.heard((self.rank + step) % self.board.world)
            if doing is None or not doing.over:
                return None if doing is None or doing.last else doing
        return None

    def _verdict(self, doing: Doing, silent_s: float) -> Failure | None:
        match statuses.state(doing):
            case "X":
                return None if self.supervised else Failure.seen(FailureKind.DIED, f"process {doing.pid} is gone", doing)
            case "T" if silent_s > STOPPED_S:
                return Failure.seen(FailureKind.STOPPED, f"process {doing.pid} is stopped (SIGSTOP)", doing)
            case None if silent_s > self.timeouts.silence_s:
                what = f"no sign of life for {silent_s:.0f} s, its process or its host ({doing.home.split(' ')[0]}) is gone"
                return Failure.seen(FailureKind.DIED, what, doing)
            case None | "T":
                return None
        if silent_s > self.timeouts.timeout_s:
            return Failure.seen(FailureKind.HUNG, f"no sign of life for {silent_s:.0f} s, its interpreter is blocked", doing)
        return None

    def _look_for_hang(self) -> None:
        """Nobody has moved for too long, though somebody waits or walks a schedule: name the one who waits for nobody."""
        limit = self.timeouts.timeout_s
        everyone = self.board.everyone()
        known = [doing for doing in everyone if doing is not None]
        if len(known) < len(everyone):
            if time.monotonic() - self._start > limit:
                absent = [rank for rank, doing in enumerate(everyone) if doing is None]
                self.board.post(
                    Failure(absent[0], FailureKind.HUNG, f"it has not begun within {limit:g} s", noticed_by=self.rank)
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
        fix = "if that is how long it takes, allow more with timeout_s"
        self.board.post(Failure.seen(FailureKind.HUNG, what, worst, fix=fix, noticed_by=self.rank))


def is_secondary(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one is gone."""
    if isinstance(error, PeerLost):
        return True
    if isinstance(error, MeshwrightError):
        return "process is gone" in error.what
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("onnection", "gloo", "roken pipe"))
