"""Another user of the same host: runs a function in a process that has given up the rights of this one."""

from __future__ import annotations

import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

STRANGER = 65534
"""The user `nobody`, who owns nothing here."""


@contextmanager
def stranger(attack: Callable[[], None]) -> Iterator[int]:
    """Run `attack()` again and again as another user until the block ends; skips where this process may not become another user.

    An attack that raises is tried again: what the attacked process answers is the business of the test, not of the attacker. A
    test in which no attack came through fails with the last error.
    """
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    done = mmap.mmap(-1, mmap.PAGESIZE)  # byte 0: an attack came through; the rest: the last error
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            assert os.getuid() == STRANGER
            _again_and_again(attack, done)
        finally:
            os._exit(1)
    try:
        yield child
        assert done[0] == 1, f"no attack came through: {bytes(done[1:]).rstrip(bytes(1)).decode(errors='replace')}"
        ended, _ = os.waitpid(child, os.WNOHANG)
        assert ended == 0, "the stranger attacked to the end"
    finally:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _again_and_again(attack: Callable[[], None], done: mmap.mmap) -> None:
    while True:
        try:
            attack()
            done[0] = 1
        except Exception:
            said = traceback.format_exc().encode()[-(mmap.PAGESIZE - 1) :]
            done[1:] = said.ljust(mmap.PAGESIZE - 1, bytes(1))
        time.sleep(0.001)
