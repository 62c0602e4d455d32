"""The time of pieces whose collectives overlap with compute: one compute lane, and channels that run one collective at a time.

    a piece       waits for the collectives that it reads, runs, and starts its own. Then its tail (weight gradients) runs.
    two halves    take turns. `turns_of` gives the turn to the half that can start first, then to the one whose next collective
                  is nearest

Merak's sub-pipelining has two halves; a plain run has one. The order is computed before a run and is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PieceTime:
    """Seconds of compute of a piece, before and after it starts its collectives."""

    seconds: float
    tail_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendTime:
    """A collective: the piece that starts it (-1: it starts at time 0), and the first piece that waits for it."""

    source: int
    reader: int
    seconds: float
    channel: str = ""


@dataclass(frozen=True, slots=True)
class HalfTime:
    """The pieces of a half in order, and its collectives."""

    pieces: tuple[PieceTime, ...]
    sends: tuple[SendTime, ...]

    def nearest(self, at: int) -> float:
        """Compute from a piece to the next one that starts a collective."""
        sources = {send.source for send in self.sends}
        total = 0.0
        for k in range(at, len(self.pieces)):
            total += self.pieces[k].seconds
            if k in sources:
                return total
        return total + 1e9


class _Clock:
    """The state of a simulation: when pieces have started and when their collectives arrive."""

    def __init__(self, halves: Sequence[HalfTime]) -> None:
        self.halves, self.at = halves, [0] * len(halves)
        self.now, self.free = 0.0, dict[str, float]()
        self.arrived: list[dict[SendTime, float]] = [{} for _ in halves]
        for number, half in enumerate(halves):
            for send in half.sends:
                if send.source < 0:
                    self._send(number, send, 0.0)

    def _send(self, half: int, send: SendTime, moment: float) -> None:
        end = max(moment, self.free.get(send.channel, 0.0)) + send.seconds
        self.free[send.channel] = self.arrived[half][send] = end

    def ready(self, half: int) -> float:
        """Returns the time at which the next piece of a half can start."""
        waits = [end for send, end in self.arrived[half].items() if send.reader == self.at[half]]
        return max([self.now, *waits])

    def run(self, half: int) -> None:
        """Runs the next piece of a half."""
        k = self.at[half]
        piece = self.halves[half].pieces[k]
        launch = self.ready(half) + piece.seconds
        for send in self.halves[half].sends:
            if send.source == k:
                self._send(half, send, launch)
        self.now = launch + piece.tail_s
        self.at[half] += 1

    @property
    def left(self) -> list[int]:
        """The halves that have pieces left."""
        return [k for k, half in enumerate(self.halves) if self.at[k] < len(half.pieces)]

    def end(self) -> float:
        """The time at which all pieces have run and all collectives have arrived."""
        return max([self.now, *(end for arrived in self.arrived for end in arrived.values())])


def turns_of(halves: Sequence[HalfTime]) -> list[int]:
    """Returns the order of pieces, as the number of the half that runs next."""
    clock, turns = _Clock(halves), []
    while left := clock.left:
        half = min(left, key=lambda k: (round(clock.ready(k), 9), round(halves[k].nearest(clock.at[k]), 9), clock.at[k], k))
        clock.run(half)
        turns.append(half)
    return turns


def weave_time(halves: Sequence[HalfTime], turns: Sequence[int] | None = None) -> float:
    """Returns the seconds that all pieces take in this order."""
    clock = _Clock(halves)
    for half in turns if turns is not None else turns_of(halves):
        clock.run(half)
    return clock.end()
