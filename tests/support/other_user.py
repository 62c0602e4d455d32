"""Another user of the same host: runs a function in a process that has given up the rights of this one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

STRANGER = 65534
"""The user `nobody`, who owns nothing here."""


@contextmanager
def stranger(attack: Callable[[], None]) -> Iterator[int]:
    """`attack()` again and again as another user, until the block ends; skips where nobody may become another one."""
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            assert os.getuid() == STRANGER
            while True:
                attack()
                time.sleep(0.001)
        finally:
            os._exit(1)
    try:
        yield child
        done, _ = os.waitpid(child, os.WNOHANG)
        assert done == 0, "the stranger attacked to the end"
    finally:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
