"""Wires between threads of one process, so that a test can run a whole grid. Results are equal bit for bit on all ranks.

`run(grid, work)` starts one thread per rank. A letter contains the name of its collective, so ranks that call collectives in
different orders fail at once, and the message has both calls. If a rank fails, the ranks that wait for it fail too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright.costs.declared import CollectiveKind, SentWords
from meshwright.costs.scheme import Grid
from meshwright.tensor.wires.wires import StartedCollective, TotalKind, Wires, reduced

T = TypeVar("T")
Letter = tuple[tuple[Any, ...], Tensor]


class LostRank(RuntimeError):
    """Raised on ranks that wait for a rank that has failed."""


class Letterbox:
    """Letters that were sent and not yet read, by group and number."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._changed = threading.Condition()
        self._letters: dict[Any, dict[int, Letter]] = {}
        self._read: Counter[Any] = Counter()
        self._timeout_s = timeout_s
        self._lost = False

    def put(self, key: Any, rank: int, letter: Letter) -> None:
        """Puts a letter into the box."""
        with self._changed:
            self._letters.setdefault(key, {})[rank] = letter
            self._changed.notify_all()

    def get(self, key: Any, ranks: tuple[int, ...]) -> list[Letter]:
        """Waits for the letters of all members of a group and returns them in order."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._lost or len(self._letters.get(key, ())) == len(ranks), timeout=self._timeout_s
            )
            if self._lost or not there:
                raise LostRank(f"waited for ranks {ranks}, heard from {sorted(self._letters.get(key, ()))}")
            found = [self._letters[key][rank] for rank in ranks]
            self._read[key] += 1
            if self._read[key] == len(ranks):
                del self._letters[key], self._read[key]
            return found

    def give_up(self) -> None:
        """Wakes all waiting ranks after a rank has failed."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()


class ThreadWires(Wires):
    """One rank of a grid in a thread."""

    def __init__(self, grid: Grid, rank: int, letterbox: Letterbox) -> None:
        super().__init__(grid, rank)
        self._letterbox = letterbox
        self._count: Counter[tuple[int, ...]] = Counter()

    def _carry(self, sent: SentWords, t: Tensor, dim: int, op: TotalKind) -> StartedCollective:
        ranks = self.grid.group(self.rank, sent.axes)
        key = (ranks, self._count[ranks])
        self._count[ranks] += 1
        self._letterbox.put(key, self.rank, ((sent.kind, sent.axes, dim, op, tuple(t.shape)), t.clone()))

        def result() -> Tensor:
            letters = self._letterbox.get(key, ranks)
            assert len({what for what, _ in letters}) == 1, f"ranks disagree: {[what for what, _ in letters]}"
            parts = [part for _, part in letters]
            if sent.kind is CollectiveKind.GATHER:
                return torch.cat(parts, dim)
            if sent.kind is CollectiveKind.SCATTER:
                parts = [self.part(part, sent.axes[0], dim) for part in parts]
            return reduced(parts, op)

        return StartedCollective(result)


def run(grid: Grid, work: Callable[[ThreadWires], T]) -> list[T]:
    """Runs `work` on every rank of a grid and returns the results. Raises the error of the first rank that fails."""
    letterbox, found, failed = Letterbox(), dict[int, T](), list[BaseException]()

    def thread(rank: int) -> None:
        try:
            found[rank] = work(ThreadWires(grid, rank, letterbox))
        except BaseException as error:  # handed to the caller below
            failed.append(error)
            letterbox.give_up()

    threads = [threading.Thread(target=thread, args=(rank,), name=f"rank {rank}") for rank in range(grid.ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for error in sorted(failed, key=lambda error: isinstance(error, LostRank)):
        raise error
    return [found[rank] for rank in range(grid.ranks)]
