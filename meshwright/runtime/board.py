"""The board on which ranks write what they do and read who failed first: a few keys in the store of a job."""

from __future__ import annotations

import time
from typing import Protocol

from meshwright.runtime.failure import Doing, Failure

_FAILURE = "failure"
_PAUSE_S = 0.02


class Keys(Protocol):
    """What a board needs of a store."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there; does not wait."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are there."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write a value if the key has the expected one (empty: is not there); what is there then."""


class Board:
    """One job's board; a connection of its own, because others wait inside theirs."""

    def __init__(self, store: Keys, world: int) -> None:
        self.store, self.world = store, world

    def post(self, failure: Failure) -> Failure:
        """Claim to be the first failure; the one that is."""
        return Failure.from_json(self.store.compare_set(_FAILURE, "", failure.to_json()))

    def failure(self) -> Failure | None:
        """The first failure, if there is one."""
        return Failure.from_json(self.store.get(_FAILURE)) if self.store.check([_FAILURE]) else None

    def await_failure(self, timeout_s: float) -> Failure | None:
        """The first failure, if it comes in time."""
        deadline = time.monotonic() + timeout_s
        while (found := self.failure()) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return found

    def say(self, doing: Doing) -> None:
        """Write what a rank is doing."""
        self.store.set(_key(doing.rank), doing.to_json())

    def heard(self, rank: int) -> Doing | None:
        """What a rank said last; None before its first word."""
        return Doing.from_json(self.store.get(_key(rank))) if self.store.check([_key(rank)]) else None

    def everyone(self) -> list[Doing | None]:
        """What each rank said last."""
        keys = [_key(rank) for rank in range(self.world)]
        if self.store.check(keys):
            return [Doing.from_json(text) for text in self.store.multi_get(keys)]
        return [self.heard(rank) for rank in range(self.world)]

    def last_words(self, failure: Failure, timeout_s: float) -> list[Doing]:
        """What everyone was doing when it learnt of a failure, as far as it is said in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [doing for doing in self.everyone() if doing is not None]
            missing = self.world - sum(d.last or d.over or d.rank == failure.rank for d in found)
            if not missing or time.monotonic() > deadline:
                return found
            time.sleep(_PAUSE_S)


def _key(rank: int) -> str:
    return f"doing/{rank}"
