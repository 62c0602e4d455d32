"""Asynchronous collectives of one rank of a grid, by axis: gather, scatter (reduce-scatter) and total (all-reduce).

    wires.gather(t, "a", 0)                   blocks
    pending = wires.start_gather(t, "a", 0)   returns at once; pending.wait() has the result

All members of a group start its collectives in the same order. Every transfer is logged with the words that a ring sends, under
the current phase of the caller. Axes of size 1 send nothing. Subclasses move the data: over process groups (`group_wires.py`),
between threads of one process (`thread_wires.py`), or on a single rank, dry or delayed (`lone_wires.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

import torch
from torch import Tensor

from meshwright.costs.declared import CollectiveKind, Phase, SentWords, transfer
from meshwright.costs.scheme import Axes, Grid


class TotalKind(StrEnum):
    """The operation of a total."""

    SUM = "sum"
    MAX = "max"


class StartedCollective:
    """A collective that was started. The first wait makes the result."""

    __slots__ = ("_make", "_result")

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = make
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Waits for the result and returns it."""
        if self._make is not None:
            self._result, self._make = self._make(), None
        assert self._result is not None
        return self._result


def done(result: Tensor) -> StartedCollective:
    """Returns a finished collective with this result."""
    return StartedCollective(lambda: result)


@dataclass
class TransferLog:
    """Words that a rank has sent, and words that were declared for it, summed by phase. The caller sets the phase."""

    phase: Phase = Phase.FORWARD
    _words: dict[Phase, Fraction] = field(default_factory=dict)
    _steps: dict[Phase, int] = field(default_factory=dict)
    _declared: dict[Phase, Fraction] = field(default_factory=dict)

    def add(self, sent: SentWords) -> None:
        """Adds a transfer."""
        self._words[sent.phase] = self.words(sent.phase) + sent.words
        self._steps[sent.phase] = self.steps(sent.phase) + sent.steps

    def declare(self, words: Mapping[Phase, Fraction]) -> None:
        """Adds transfers that were computed in advance for the layers that run now."""
        for phase, more in words.items():
            self._declared[phase] = self.declared(phase) + more

    def words(self, phase: Phase) -> Fraction:
        """Returns the words that were sent in a phase."""
        return self._words.get(phase, Fraction(0))

    def declared(self, phase: Phase) -> Fraction:
        """Returns the words that were declared for a phase."""
        return self._declared.get(phase, Fraction(0))

    def steps(self, phase: Phase) -> int:
        """Returns the number of ring steps in a phase."""
        return self._steps.get(phase, 0)

    def differences(self) -> list[str]:
        """Returns the phases in which the words sent differ from those declared."""
        return [
            f"{phase}: {self.words(phase)} words sent, {self.declared(phase)} declared"
            for phase in Phase
            if self.words(phase) != self.declared(phase)
        ]

    def clear(self) -> None:
        """Resets all sums. The phase stays."""
        for account in (self._words, self._steps, self._declared):
            account.clear()


class Wires(ABC):
    """The collectives of one rank. Subclasses implement `_carry`, which moves the data."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self.grid, self.rank, self.at = grid, rank, grid.at(rank)
        self.log = TransferLog()

    def start_gather(self, t: Tensor, axis: str, dim: int) -> StartedCollective:
        """Starts to join the shards of an axis along a dimension."""
        return self._start(CollectiveKind.GATHER, t, (axis,), dim, TotalKind.SUM)

    def start_scatter(self, t: Tensor, axis: str, dim: int) -> StartedCollective:
        """Starts a sum over an axis, of which each rank gets its shard along a dimension."""
        return self._start(CollectiveKind.SCATTER, t, (axis,), dim, TotalKind.SUM)

    def start_total(self, t: Tensor, axes: Axes, op: TotalKind = TotalKind.SUM) -> StartedCollective:
        """Starts a sum or maximum over some axes, of which every rank gets the result."""
        return self._start(CollectiveKind.TOTAL, t, self.grid.wide(axes), 0, op)

    def gather(self, t: Tensor, axis: str, dim: int) -> Tensor:
        """As `start_gather`, and waits."""
        return self.start_gather(t, axis, dim).wait()

    def scatter(self, t: Tensor, axis: str, dim: int) -> Tensor:
        """As `start_scatter`, and waits."""
        return self.start_scatter(t, axis, dim).wait()

    def total(self, t: Tensor, axes: Axes, op: TotalKind = TotalKind.SUM) -> Tensor:
        """As `start_total`, and waits."""
        return self.start_total(t, axes, op).wait()

    def part(self, t: Tensor, axis: str, dim: int) -> Tensor:
        """Returns this rank's shard of a whole tensor along a dimension. Sends nothing."""
        return t.chunk(self.grid.size((axis,)), dim)[self.at[axis]] if self.grid.size((axis,)) > 1 else t

    def _start(self, kind: CollectiveKind, t: Tensor, axes: Axes, dim: int, op: TotalKind) -> StartedCollective:
        ranks = self.grid.size(axes)
        if ranks == 1:
            return done(t)
        if kind is CollectiveKind.SCATTER:
            assert t.shape[dim] % ranks == 0, f"{tuple(t.shape)} does not divide by {ranks} along {dim}"
        sent = transfer(self.log.phase, kind, axes, t.numel(), self.grid)
        self.log.add(sent)
        return self._carry(sent, t.detach(), dim, op)

    @abstractmethod
    def _carry(self, sent: SentWords, t: Tensor, dim: int, op: TotalKind) -> StartedCollective:
        """Starts to move the data."""


def reduced(parts: list[Tensor], op: TotalKind) -> Tensor:
    """Returns the reduction of the tensors of a group, in the order of its ranks, so that all ranks get the same bits."""
    stacked = torch.stack(parts)
    return stacked.sum(0) if op is TotalKind.SUM else stacked.amax(0)
