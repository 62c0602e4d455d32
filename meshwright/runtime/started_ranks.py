"""The numbers that processes were started with. Messages to users name processes by them.

The process group of a plan has only the ranks that take part. It counts them from 0, in their order. If some ranks are idle,
the two numbers of a process differ. The environment holds the numbers, so that all threads of the process see them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_MEMBERS = "MESHWRIGHT_MEMBERS"


@contextmanager
def members(started: Sequence[int]) -> Iterator[None]:
    """Sets the numbers of the processes of the next process group, in its order. After an error they stay, for its text."""
    os.environ.pop(_MEMBERS, None)
    if list(started) != list(range(len(started))):
        os.environ[_MEMBERS] = " ".join(map(str, started))
    yield
    os.environ.pop(_MEMBERS, None)


def started(rank: int) -> int:
    """Returns the number that the process of a rank of the process group was started with."""
    found = os.environ.get(_MEMBERS)
    return rank if found is None else int(found.split()[rank])


def own_number(rank: int) -> int:
    """Returns the rank in the process group of the process that was started with this number."""
    found = os.environ.get(_MEMBERS)
    return rank if found is None else found.split().index(str(rank))
