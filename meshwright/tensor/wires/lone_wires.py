"""Wires of a single rank: collectives have the right shapes and a full log, and this rank's data replaces that of the others.

*Dry* wires are for counting words and memory without a process group. *Delayed* wires are for measuring overlap: a collective
ends alpha + beta x words seconds after the one before it on its channel, without using the CPU. Each axis is a channel.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.costs.declared import CollectiveKind, SentWords
from meshwright.costs.scheme import Axes, Grid
from meshwright.tensor.wires.wires import StartedCollective, TotalKind, Wires, done


class DryWires(Wires):
    """Sends nothing. Every other rank is assumed to hold the same data."""

    def _carry(self, sent: SentWords, t: Tensor, dim: int, op: TotalKind) -> StartedCollective:
        return done(self.stand_in(sent, t, dim))

    def stand_in(self, sent: SentWords, t: Tensor, dim: int) -> Tensor:
        """Returns the result of a collective if every other rank held the same data."""
        if sent.kind is CollectiveKind.GATHER:
            return torch.cat([t] * self.grid.size(sent.axes), dim)
        if sent.kind is CollectiveKind.SCATTER:
            return self.part(t, sent.axes[0], dim).contiguous()
        return t.clone()


@dataclass(frozen=True, slots=True)
class Interval:
    """When a collective used its channel, in seconds of the monotonic clock."""

    transfer: SentWords
    start_s: float
    end_s: float


class DelayedWires(DryWires):
    """Collectives take wall-clock time. Those of one channel run one after another."""

    def __init__(self, grid: Grid, rank: int, *, alpha_s: float, beta_s: float, shared_channel: bool = False) -> None:
        super().__init__(grid, rank)
        self._alpha_s, self._beta_s, self._shared = alpha_s, beta_s, shared_channel
        self._free_s: dict[Axes, float] = {}
        self.intervals: list[Interval] = []

    def seconds(self, words: float) -> float:
        """Returns the seconds of a collective with this many words."""
        return self._alpha_s + self._beta_s * words

    def _carry(self, sent: SentWords, t: Tensor, dim: int, op: TotalKind) -> StartedCollective:
        channel: Axes = () if self._shared else sent.axes
        start = max(time.monotonic(), self._free_s.get(channel, 0.0))
        end = start + self.seconds(float(sent.words))
        self._free_s[channel] = end
        self.intervals.append(Interval(sent, start, end))
        result = self.stand_in(sent, t, dim)

        def wait() -> Tensor:
            left = end - time.monotonic()
            if left > 0:
                time.sleep(left)
            return result

        return StartedCollective(wait)
