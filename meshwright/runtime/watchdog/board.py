"""The board: a few keys in the store of a job, where ranks write their status and read which rank failed first.

Every process that can reach the port of the store can write to it. Entries of local workers carry an HMAC with a secret from
their parent. Entries without it, or with a wrong format, are logged and ignored. Under torchrun ranks have no secret: entries are
parsed strictly, and processes that can reach the store are trusted, as in torch itself.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from meshwright.runtime.watchdog.failure import Doing, Failure

_FAILURE = "failure"
_PAUSE_S = 0.02
_TRIES = 20
_MARK = 64

_log = logging.getLogger(__name__)


Entry = TypeVar("Entry", Doing, Failure)


class Board:
    """The board of one job. It has its own connection, because other connections block during waits. `secret` signs entries."""

    def __init__(self, store: Store, members: int | Sequence[int], *, secret: bytes = b"") -> None:
        """`members` are the ranks that take part, or their number if they count from 0."""
        self.members = tuple(range(members)) if isinstance(members, int) else tuple(members)
        self.store, self.secret = store, secret
        self._named: set[str] = set()

    def post(self, failure: Failure) -> Failure:
        """Posts a failure, and returns the first failure of the job, which may be an earlier one."""
        entry, before = self._signed(_FAILURE, failure.to_json()), ""
        for _ in range(_TRIES):
            there = self.store.compare_set(_FAILURE, before, entry)
            if (found := self._failure(there)) is not None:
                return found
            before = there.decode(errors="replace")  # not an entry of this job: replace it
        self.store.set(_FAILURE, entry)
        return failure

    def failure(self) -> Failure | None:
        """Returns the first failure, or None."""
        return self._failure(self.store.get(_FAILURE)) if self.store.check([_FAILURE]) else None

    def await_failure(self, timeout_s: float) -> Failure | None:
        """Waits for the first failure; None after the timeout."""
        deadline = time.monotonic() + timeout_s
        while (found := self.failure()) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return found

    def say(self, doing: Doing) -> None:
        """Writes the status of a rank."""
        self.store.set(_key(doing.rank), self._signed(_key(doing.rank), doing.to_json()))

    def heard(self, rank: int) -> Doing | None:
        """Returns the last status of a rank; None before the first one."""
        return self._doing(rank, self.store.get(_key(rank))) if self.store.check([_key(rank)]) else None

    def everyone(self) -> list[Doing | None]:
        """Returns the last status of every rank."""
        keys = [_key(rank) for rank in self.members]
        if self.store.check(keys):
            return [self._doing(rank, text) for rank, text in zip(self.members, self.store.multi_get(keys), strict=True)]
        return [self.heard(rank) for rank in self.members]

    def last_words(self, failure: Failure, timeout_s: float) -> list[Doing]:
        """Returns the status of each rank at the time it learnt of a failure, for ranks that report within the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [doing for doing in self.everyone() if doing is not None]
            missing = len(self.members) - sum(d.last or d.over or d.rank == failure.rank for d in found)
            if not missing or time.monotonic() > deadline:
                return found
            time.sleep(_PAUSE_S)

    def _failure(self, entry: bytes) -> Failure | None:
        return self._read(_FAILURE, entry, Failure, self.members)

    def _doing(self, rank: int, entry: bytes) -> Doing | None:
        return self._read(_key(rank), entry, Doing, (rank,))

    def _read(self, key: str, entry: bytes, kind: type[Entry], ranks: Sequence[int]) -> Entry | None:
        """Returns an entry about one of these ranks; None for anything else."""
        try:
            found = kind.from_json(self._opened(key, entry))
            if found.rank not in ranks:
                raise ValueError(f"it is about rank {found.rank}")
        except ValueError as error:
            self._name(key, error)
            return None
        return found

    def _signed(self, key: str, text: str) -> str:
        """Returns an entry. If there is a secret, the entry starts with a signature for this key."""
        return f"{self._mark(key, text.encode())}{text}" if self.secret else text

    def _opened(self, key: str, entry: bytes) -> bytes:
        if not self.secret:
            return entry
        mark, text = entry[:_MARK], entry[_MARK:]
        if not hmac.compare_digest(mark, self._mark(key, text).encode()):
            raise ValueError("no rank of this run wrote it")
        return text

    def _mark(self, key: str, text: bytes) -> str:
        return hmac.new(self.secret, f"{key}/".encode() + text, "sha256").hexdigest()

    def _name(self, key: str, error: ValueError) -> None:
        if key not in self._named:
            self._named.add(key)
            _log.warning("ignored an unexpected entry under '%s' in the store of this run: %s", key, str(error)[:200])


def _key(rank: int) -> str:
    return f"doing/{rank}"
