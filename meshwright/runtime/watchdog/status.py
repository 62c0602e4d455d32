"""What this process is doing, as seen by another thread: the executor's instruction, what it waits for, and the user's line."""

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
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.faults import label, other
from meshwright.runtime.watchdog.failure import Doing

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_NOT_THE_USERS = (_TORCH, _OURS, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen", "<string>")
# A thread that is inside one of these waits for other ranks: nothing else in them takes long.
_WAITING = (_TORCH + "distributed" + os.sep, _OURS + "runtime/transport/")
_WAITING_INNERMOST = (
    _OURS + "runtime/parameters/unit.py",
    _OURS + "runtime/launch/worker_main.py",
)  # these wait, and call what computes


class WaitingEdges(Protocol):
    """Where an executor's messages pass; `waiting` is the channel that it waits on."""

    waiting: Channel | None


class Walker(Protocol):
    """What is watched of an executor."""

    at: Instruction | None
    walks: int

    @property
    def edges(self) -> WaitingEdges:
        """Its channels."""


class Seat(Protocol):
    """Memory that outlives the process: who dies at an instruction has said where."""

    value: bytes


class Status:
    """Made in the thread that works; `look` is called from the one that watches."""

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
        """A walk begins: where to write the words of each instruction."""
        self.walker = walker
        return self.seat

    def look(self, *, last: bool = False) -> Doing:
        """What the thread is doing now."""
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
            peer=None if channel is None else other(channel, self.rank),
            waits=waits,
            where=where,
            still_s=round(now - self._since, 2),
            over=self.over,
            last=last,
            home=self._home,
            pid=os.getpid(),
            born=self._born,
        )
        return self.seen


_CURRENT: ContextVar[Status | None] = ContextVar("status", default=None)


def current() -> Status | None:
    """The status of the job that this code is part of, if somebody watches it."""
    return _CURRENT.get()


def begin(rank: int, seat: Seat | None = None) -> Status:
    """A new status for the code that follows in this thread."""
    status = Status(rank, seat)
    _CURRENT.set(status)
    return status


def _read(frame: FrameType | None) -> tuple[str, str]:
    """What a stack waits in, if it does, and the innermost line that is the user's own."""
    waits, where = "", ""
    if frame is not None and frame.f_code.co_filename in _WAITING_INNERMOST:
        waits = "a collective"
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_WAITING):
            waits = code.co_name if code.co_name != "wrapper" else waits or "a collective"  # a logger wraps them all
        elif not code.co_filename.startswith(_NOT_THE_USERS):
            where = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            break
        frame = frame.f_back
    return waits, where


def home() -> str:
    """What two processes have in common if they can see each other by number."""
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
    """When a process was started, by the kernel's count: numbers are used again."""
    found = _stat(pid)
    return int(found[19]) if found else 0


def state(doing: Doing) -> str | None:
    """The kernel's letter for a process of this host, X for one that is gone; None where it cannot be known."""
    if not doing.home or doing.home != home():
        return None
    found = _stat(doing.pid)
    return found[0] if found and int(found[19]) == doing.born and found[0] != "Z" else "X"
