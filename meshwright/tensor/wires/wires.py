"""The collectives of one rank of a grid, by axis: gather, scatter (reduce-scatter) and total (all-reduce), started and awaited.

    wires.gather(t, "a", 0)                   blocks
    pending = wires.start_gather(t, "a", 0)   the result is made at pending.wait()

A group of ranks has one order of collectives; all of its members start them in that order. Every transfer is logged with the
words that a ring sends, by the phase that the caller is in. Axes of size 1 send nothing. Carriers: process groups
(`group_wires.py`), threads of one process (`thread_wires.py`), and one rank alone, dry or delayed (`lone_wires.py`).
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
    """How a total is formed."""

    SUM = "sum"
    MAX = "max"


class StartedCollective:
    """A collective under way: the result is made at the first wait."""

    __slots__ = ("_make", "_result")

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = make
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, once it is there."""
        if self._make is not None:
            self._result, self._make = self._make(), None
        assert self._result is not None
        return self._result


def done(result: Tensor) -> StartedCollective:
    """A collective that was none."""
    return StartedCollective(lambda: result)


@dataclass
class TransferLog:
    """What a rank has sent and what was declared for it, added up by phase; the caller sets the phase."""

    phase: Phase = Phase.FORWARD
    _words: dict[Phase, Fraction] = field(default_factory=dict)
    _steps: dict[Phase, int] = field(default_factory=dict)
    _declared: dict[Phase, Fraction] = field(default_factory=dict)

    def add(self, sent: SentWords) -> None:
        """One more transfer."""
        self._words[sent.phase] = self.words(sent.phase) + sent.words
        self._steps[sent.phase] = self.steps(sent.phase) + sent.steps

    def declare(self, words: Mapping[Phase, Fraction]) -> None:
        """What was declared for something that runs now."""
        for phase, more in words.items():
            self._declared[phase] = self.declared(phase) + more

    def words(self, phase: Phase) -> Fraction:
        """The words that were sent in a phase."""
        return self._words.get(phase, Fraction(0))

    def declared(self, phase: Phase) -> Fraction:
        """The words that were declared for a phase."""
        return self._declared.get(phase, Fraction(0))

    def steps(self, phase: Phase) -> int:
        """The steps of rings of a phase."""
        return self._steps.get(phase, 0)

    def differences(self) -> list[str]:
        """The phases in which other words were sent than declared."""
        return [
            f"{phase}: {self.words(phase)} words sent, {self.declared(phase)} declared"
            for phase in Phase
            if self.words(phase) != self.declared(phase)
        ]

    def clear(self) -> None:
        """Forget everything but the phase."""
        for account in (self._words, self._steps, self._declared):
            account.clear()


class Wires(ABC):
    """The collectives of one rank; a carrier moves the bytes."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self.grid, self.rank, self.at = grid, rank, grid.at(rank)
        self.log = TransferLog()

    def start_gather(self, t: Tensor, axis: str, dim: int) -> StartedCollective:
        """The parts of an axis, joined along a dimension."""
        return self._start(CollectiveKind.GATHER, t, (axis,), dim, TotalKind.SUM)

    def start_scatter(self, t: Tensor, axis: str, dim: int) -> StartedCollective:
        """The sum over an axis, of which each rank keeps its part along a dimension."""
        return self._start(CollectiveKind.SCATTER, t, (axis,), dim, TotalKind.SUM)

    def start_total(self, t: Tensor, axes: Axes, op: TotalKind = TotalKind.SUM) -> StartedCollective:
        """The sum or the maximum over some axes, on every rank."""
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
        """This rank's part of a whole along a dimension: nothing is sent."""
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
        """Start to move the bytes."""


def reduced(parts: list[Tensor], op: TotalKind) -> Tensor:
    """Tensors of a group's ranks as one; in the order of the ranks, so that all get the same bits."""
    stacked = torch.stack(parts)
    return stacked.sum(0) if op is TotalKind.SUM else stacked.amax(0)
