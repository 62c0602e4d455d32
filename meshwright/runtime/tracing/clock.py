"""One clock for all ranks, and sleeping until a time of this clock.

All processes of a host share CLOCK_MONOTONIC. Other hosts add their offset to rank 0's clock (`clock_offset.py`). Sleeps have an
absolute deadline, so time that passes before a sleep does not make it longer. This file does not import torch.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

now = time.monotonic


class Timing(StrEnum):
    """When an emulated action starts."""

    WALL = "wall"  # when its message has arrived: measures the executor
    STAMPED = "stamped"  # at the model time that messages carry: measures the schedule


@cache
def _absolute_sleep() -> Callable[[float], None] | None:
    """Returns the system call that sleeps until a deadline, or None if there is none. Imports ctypes only on the first sleep."""
    if sys.platform != "linux":
        return None
    import ctypes

    class _Timespec(ctypes.Structure):
        _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))

    nanosleep, byref = ctypes.CDLL(None).clock_nanosleep, ctypes.byref

    def sleep(moment_s: float) -> None:
        whole = int(moment_s)
        deadline = byref(_Timespec(whole, int((moment_s - whole) * 1e9)))
        while nanosleep(_CLOCK_MONOTONIC, _TIMER_ABSTIME, deadline, None) == errno.EINTR:
            pass

    return sleep


def sleep_until(moment_s: float) -> None:
    """Sleeps until a time of this host's clock. Returns at once if it has passed."""
    left = moment_s - now()
    if left <= 0:
        return
    if (sleep := _absolute_sleep()) is not None:
        sleep(moment_s)
    else:
        time.sleep(left)


@contextmanager
def fine_timers() -> Iterator[None]:
    """Sets the timer slack of this thread to 1 nanosecond instead of 50 microseconds, so sleeps end closer to their deadline."""
    if sys.platform != "linux":
        yield
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, 0, 0, 0, 0)  # 0 restores the default


_CLOCK_MONOTONIC, _TIMER_ABSTIME, _PR_SET_TIMERSLACK = 1, 1, 29


@dataclass(frozen=True, slots=True)
class Clock:
    """Rank 0's clock, read on this host."""

    offset_s: float = 0.0

    def now(self) -> float:
        """Returns the current time."""
        return now() + self.offset_s

    def sleep_until(self, moment_s: float) -> None:
        """Sleeps until a time of this clock. Returns at once if it has passed."""
        sleep_until(moment_s - self.offset_s)


def busy_s() -> float:
    """Returns the CPU seconds that all processes of this host have used, including stolen time; 0 if the system does not tell."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=11)
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = (int(word) for word in words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
