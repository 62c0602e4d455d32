"""Moves: changes of the layout of a local tensor. Each has an adjoint, which the gradient takes.

| move | forward | backward |
|---|---|---|
| gather | joins the shards of an axis | reduce-scatter if the gradient is a partial sum, else takes this rank's shard |
| scatter | reduce-scatter over an axis | gather |
| total | all-reduce over axes | nothing: every rank has the whole gradient |
| copy | nothing: sharded work reads a whole tensor | all-reduce over the axes |
| part | takes this rank's shard of a whole tensor | gather |
| maximum | maximum over axes | none |

A dimension that was merged from several is split into its factors during a move (`narrow` has the sizes of the factors on the
cut side).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from meshwright.costs.declared import CollectiveKind, Phase, SentWords, transfer
from meshwright.costs.scheme import Axes, Grid
from meshwright.tensor.wires.wires import StartedCollective, TotalKind, Wires, done


class MoveKind(StrEnum):
    """The kinds of moves."""

    GATHER = "gather"
    SCATTER = "scatter"
    TOTAL = "total"
    COPY = "copy"
    PART = "part"
    MAXIMUM = "maximum"


_FORWARD = {MoveKind.GATHER: CollectiveKind.GATHER, MoveKind.SCATTER: CollectiveKind.SCATTER}
_BACKWARD = {MoveKind.GATHER: CollectiveKind.SCATTER, MoveKind.COPY: CollectiveKind.TOTAL}


@dataclass(frozen=True, slots=True)
class Move:
    """One move. With `sums`, the gradient of a gather's result is a partial sum, which is scattered."""

    kind: MoveKind
    axes: Axes
    given: tuple[int, ...]
    """The shape of the argument."""
    made: tuple[int, ...]
    """The shape of the result."""
    narrow: tuple[int, ...] = ()
    dim: int = 0
    sums: bool = False

    def start(self, t: Tensor, wires: Wires) -> StartedCollective:
        """Starts the move."""
        match self.kind:
            case MoveKind.GATHER:
                return self._gather(t, wires, self.made)
            case MoveKind.SCATTER:
                return self._scatter(t, wires, self.made)
            case MoveKind.PART:
                return self._part(t, wires, self.made)
            case MoveKind.TOTAL:
                return wires.start_total(t, self.axes)
            case MoveKind.MAXIMUM:
                return wires.start_total(t, self.axes, TotalKind.MAX)
            case MoveKind.COPY:
                return done(t)

    def start_back(self, g: Tensor, wires: Wires) -> StartedCollective:
        """Starts the adjoint, on a gradient of the result."""
        match self.kind:
            case MoveKind.GATHER:
                return self._scatter(g, wires, self.given) if self.sums else self._part(g, wires, self.given)
            case MoveKind.SCATTER | MoveKind.PART:
                return self._gather(g, wires, self.given)
            case MoveKind.COPY:
                return wires.start_total(g, self.axes)
            case _:
                return done(g)

    @property
    def speaks(self) -> bool:
        """Whether the move sends anything."""
        return self.kind not in (MoveKind.COPY, MoveKind.PART)

    @property
    def answers(self) -> bool:
        """Whether the adjoint sends anything."""
        return self.kind in (MoveKind.SCATTER, MoveKind.COPY, MoveKind.PART) or (self.kind is MoveKind.GATHER and self.sums)

    def transfers(self, grid: Grid, *, learns: bool, again: bool = False) -> list[SentWords]:
        """Returns the transfers, forward and backward. With `again`, the backward repeats a gather."""
        given, made, found = math.prod(self.given), math.prod(self.made), []
        if self.speaks:
            kind = _FORWARD.get(self.kind, CollectiveKind.TOTAL)
            found.append(transfer(Phase.FORWARD, kind, self.axes, given, grid))
            if again and self.kind is MoveKind.GATHER:
                found.append(transfer(Phase.BACKWARD, kind, self.axes, given, grid))
        if learns and self.answers:
            found.append(transfer(Phase.BACKWARD, _BACKWARD.get(self.kind, CollectiveKind.GATHER), self.axes, made, grid))
        return found

    def _wide(self, wires: Wires) -> tuple[int, ...]:
        ranks = wires.grid.size(self.axes)
        return tuple(size * ranks if k == self.dim else size for k, size in enumerate(self.narrow))

    def _gather(self, t: Tensor, wires: Wires, shape: tuple[int, ...]) -> StartedCollective:
        pending = wires.start_gather(t.reshape(self.narrow), self.axes[0], self.dim)
        return StartedCollective(lambda: pending.wait().reshape(shape))

    def _scatter(self, t: Tensor, wires: Wires, shape: tuple[int, ...]) -> StartedCollective:
        pending = wires.start_scatter(t.reshape(self._wide(wires)), self.axes[0], self.dim)
        return StartedCollective(lambda: pending.wait().reshape(shape))

    def _part(self, t: Tensor, wires: Wires, shape: tuple[int, ...]) -> StartedCollective:
        return done(wires.part(t.reshape(self._wide(wires)), self.axes[0], self.dim).contiguous().reshape(shape))


class _Blocking(Function):
    """A blocking move, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, move: Move, wires: Wires) -> Tensor:
        """Runs the move."""
        ctx.call = move, wires
        result = move.start(t, wires).wait()
        if move.kind is MoveKind.MAXIMUM:
            ctx.mark_non_differentiable(result)
        return result.view_as(result) if result is t else result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Runs the adjoint."""
        move, wires = ctx.call
        wires.log.phase = Phase.BACKWARD
        return move.start_back(g, wires).wait(), None, None


blocking: Callable[[Tensor, Move, Wires], Tensor] = _Blocking.apply
"""Moves a tensor and waits for the result."""


class Moved(nn.Module):
    """A move in a graph. `weight`: it moves a parameter, so it can start early. `learns`: it has a gradient."""

    def __init__(self, move: Move, wires: Wires, *, weight: bool = False, learns: bool = True) -> None:
        super().__init__()
        self.move, self.wires, self.weight, self.learns = move, wires, weight, learns

    def forward(self, t: Tensor) -> Tensor:
        """Returns the moved tensor."""
        if t.is_floating_point():
            return blocking(t, self.move, self.wires)
        return self.move.start(t, self.wires).wait()
