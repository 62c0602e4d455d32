"""One clock for all ranks, and sleeping to a moment on it.

CLOCK_MONOTONIC is shared by all processes of a host; other hosts add their offset to rank 0's (`clock_offset.py`). Sleeps go to
an absolute deadline, so that what happens before them is not added to them. No torch in here.
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

    WALL = "wall"  # when its message has really arrived: measures the executor
    STAMPED = "stamped"  # when the model says, which messages carry: measures the schedule


@cache
def _absolute_sleep() -> Callable[[float], None] | None:
    """Sleeping to a moment by the system itself, where it can; ctypes is loaded only when something sleeps."""
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
    """Return at a moment of this host's clock; at once if it is over."""
    left = moment_s - now()
    if left <= 0:
        return
    if (sleep := _absolute_sleep()) is not None:
        sleep(moment_s)
    else:
        time.sleep(left)


@contextmanager
def fine_timers() -> Iterator[None]:
    """Let sleeps of this thread end within a nanosecond of their deadline instead of the usual 50 microseconds."""
    if sys.platform != "linux":
        yield
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, 0, 0, 0, 0)  # 0 is the default again


_CLOCK_MONOTONIC, _TIMER_ABSTIME, _PR_SET_TIMERSLACK = 1, 1, 29


@dataclass(frozen=True, slots=True)
class Clock:
    """Rank 0's clock as read on this host."""

    offset_s: float = 0.0

    def now(self) -> float:
        """The time."""
        return now() + self.offset_s

    def sleep_until(self, moment_s: float) -> None:
        """Return at a moment; at once if it is over."""
        sleep_until(moment_s - self.offset_s)


def busy_s() -> float:
    """CPU seconds that all processes of this host have used, stolen ones included; 0 where the system does not say."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=11)
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = (int(word) for word in words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
