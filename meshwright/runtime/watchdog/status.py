"""What this process is doing, as another thread sees it: the instruction, what it waits for, and the line of user code."""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch

from meshwright.runtime.program import Instruction
from meshwright.runtime.started_ranks import own_number, started
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.faults import label, other
from meshwright.runtime.watchdog.failure import Doing

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_NOT_THE_USERS = (_TORCH, _OURS, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen", "<string>")
# A thread inside one of these files waits for other ranks, because nothing else in them takes long.
_WAITING = (_TORCH + "distributed" + os.sep, _OURS + "runtime/transport/")
_WAITING_INNERMOST = (
    _OURS + "runtime/parameters/unit.py",
    _OURS + "runtime/launch/worker_main.py",
)  # these wait too, but they also call code that computes


class WaitingEdges(Protocol):
    """The channels of an executor; `waiting` is the one that it waits on."""

    waiting: Channel | None


class Walker(Protocol):
    """The part of an executor that the watchdog reads."""

    at: Instruction | None
    walks: int
    worker: int | None
    """Its worker, if the plan maps workers to ranks."""

    @property
    def edges(self) -> WaitingEdges:
        """Its channels."""


class Seat(Protocol):
    """Shared memory that outlives a worker. It holds the current instruction, so the parent knows where a worker died."""

    value: bytes


class Status:
    """What one thread is doing. It is created in that thread; the watchdog thread calls `look`."""

    def __init__(self, rank: int, seat: Seat | None = None) -> None:
        self.rank, self.seat = rank, seat
        self.seen = Doing(rank)
        self.walker: Walker | None = None
        self.over = False
        self._thread = threading.get_ident()
        self._beat = 0
        self._mark: object = None
        self._since = time.monotonic()
        self._home, self._born = home(), born(os.getpid())

    def seated(self, walker: Walker) -> Seat | None:
        """Registers the executor of a walk that starts. Returns the memory to write each instruction to."""
        self.walker = walker
        return self.seat

    def look(self, *, last: bool = False) -> Doing:
        """Returns what the thread is doing now."""
        walker = self.walker
        instruction = None if walker is None else walker.at
        channel = (
            None
            if walker is None or instruction is None
            else walker.edges.waiting or (instruction.channel if instruction.sends else None)
        )
        waits, where = _read(sys._current_frames().get(self._thread))
        if channel is not None:
            waits = label(channel)
        now = time.monotonic()
        mark = (id(walker), 0 if walker is None else walker.walks, id(instruction), None if instruction is not None else where)
        if mark != self._mark:
            self._mark, self._since = mark, now
        self._beat += 1
        self.seen = Doing(
            self.rank,
            self._beat,
            action="" if instruction is None else instruction.name,
            stage=None if instruction is None else instruction.stage,
            peer=None if channel is None else started(other(channel, own_number(self.rank))),
            waits=waits,
            where=where,
            still_s=round(now - self._since, 2),
            over=self.over,
            last=last,
            home=self._home,
            pid=os.getpid(),
            born=self._born,
            worker=None if walker is None else walker.worker,
        )
        return self.seen


_CURRENT: ContextVar[Status | None] = ContextVar("status", default=None)


def current() -> Status | None:
    """Returns the status of the job that this code belongs to, or None if there is no watchdog."""
    return _CURRENT.get()


def begin(rank: int, seat: Seat | None = None) -> Status:
    """Creates the status for the code that follows in this thread."""
    status = Status(rank, seat)
    _CURRENT.set(status)
    return status


def _read(frame: FrameType | None) -> tuple[str, str]:
    """Returns what a stack waits in (empty if it does not wait), and its innermost line of user code."""
    waits, where = "", ""
    if frame is not None and frame.f_code.co_filename in _WAITING_INNERMOST:
        waits = "a collective"
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_WAITING):
            waits = (
                code.co_name if code.co_name != "wrapper" else waits or "a collective"
            )  # torch's logger wraps every collective
        elif not code.co_filename.startswith(_NOT_THE_USERS):
            where = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            break
        frame = frame.f_back
    return waits, where


def home() -> str:
    """Returns a text that is equal for two processes that can see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def born(pid: int) -> int:
    """Returns the start time of a process in kernel ticks. It tells processes apart that had the same id."""
    found = _stat(pid)
    return int(found[19]) if found else 0


def state(doing: Doing) -> str | None:
    """Returns the kernel's state letter for a process of this host, X if it has ended, or None if it is not on this host."""
    if not doing.home or doing.home != home():
        return None
    found = _stat(doing.pid)
    return found[0] if found and int(found[19]) == doing.born and found[0] != "Z" else "X"
