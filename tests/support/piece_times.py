"""Estimates the times of pieces from their multiply-adds, and of collectives from their words, for `overlap_time.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.costs.declared import Phase
from meshwright.tensor.weave.pieces import Border, PieceGraph
from meshwright.tensor.weave.weave import Weave
from tests.support.overlap_time import HalfTime, PieceTime, SendTime

Seconds = Callable[[float], float]


def multiply_adds(pieces: PieceGraph, given: Mapping[str, Any]) -> list[int]:
    """Returns the multiply-adds of the products of every piece, counted in one forward on dry wires."""
    weave, counts = Weave([pieces], keep=True), [0] * len(pieces.pieces)

    def spend(count: int) -> None:
        counts[weave.halves[0].at - 1] += count

    before, pieces.slot.spend = pieces.slot.spend, spend
    with torch.no_grad():
        weave.forward([given])
    pieces.slot.spend = before
    return counts


def _words(border: Border, pieces: PieceGraph, phase: Phase) -> float:
    grid = pieces.wires.grid
    found = [t for move in border.route.moves for t in move.transfers(grid, learns=border.learns) if t.phase is phase]
    return float(sum(t.words for t in found))


def forward_times(pieces: PieceGraph, counts: list[int], *, rate_s: float, collective: Seconds) -> HalfTime:
    """Returns the times of a forward. A move goes from the piece that starts it to its first reader."""
    launch = {border.name: k for k, piece in enumerate(pieces.pieces) for border in piece.borders}
    sends = []
    for border in pieces.borders.values():
        words = _words(border, pieces, Phase.FORWARD)
        if words and border.name in pieces.first:
            source, reader = launch.get(border.name, -1), pieces.first[border.name]
            sends.append(SendTime(source, reader, collective(words), "".join(border.route.moves[0].axes)))
    return HalfTime(tuple(PieceTime(count * rate_s) for count in counts), tuple(sends))


def backward_times(pieces: PieceGraph, counts: list[int], *, rate_s: float, collective: Seconds) -> HalfTime:
    """Returns the times of a backward: pieces in reverse. A move goes from its first reader to the maker of its argument."""
    last = len(pieces.pieces) - 1
    launch = {border.name: k for k, piece in enumerate(pieces.pieces) for border in piece.borders}
    sends = []
    for border in pieces.borders.values():
        words = _words(border, pieces, Phase.BACKWARD)
        if words and border.name in pieces.first and border.name in launch:
            channel = "".join(border.route.moves[0].axes)
            sends.append(SendTime(last - pieces.first[border.name], last - launch[border.name], collective(words), channel))
    times = tuple(PieceTime(count * rate_s, count * rate_s) for count in reversed(counts))
    return HalfTime(times, tuple(sends))
