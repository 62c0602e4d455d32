"""Another user of the same host: runs a function in a process that has given up the rights of this one."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

STRANGER = 65534
"""The user `nobody`, who owns nothing here."""

READY, HIT = "ready", "hit"


@contextmanager
def stranger(attack: Callable[..., None], *args: Any) -> Iterator[int]:
    """Run `attack(*args)` again and again as another user until the block ends; skips where this process is not root.

    The attacker is a new process, not a fork: this one has threads, and a fork of it would crash now and then. An attack that
    raises is tried again. A test in which no attack came through fails with what the attacker said.
    """
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    fresh = multiprocessing.get_context("spawn")
    here, there = fresh.Pipe()
    child = fresh.Process(target=_attack_for_ever, args=(attack, args, there), daemon=True)
    child.start()
    try:
        assert here.poll(60) and here.recv() == READY
        yield child.pid or 0
        assert child.exitcode is None, f"the stranger ended with exit code {child.exitcode}"
        said = []
        while here.poll():
            said.append(here.recv())
        assert HIT in said, f"no attack came through: {said}"
    finally:
        child.kill()
        child.join()


def _attack_for_ever(attack: Callable[..., None], args: tuple[Any, ...], told: Connection) -> None:
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    assert os.getuid() == STRANGER
    told.send(READY)
    hits = errors = 0
    while True:
        try:
            attack(*args)
            hits += 1
            if hits == 1:
                told.send(HIT)
        except Exception:
            errors += 1
            if errors < 10:
                told.send(traceback.format_exc())
        time.sleep(0.001)
