"""Whole weights of a run in pieces: gathered once for all halves, the next ones ahead, their gradients scattered behind.

Kept as shards, a whole weight is dropped after its last reader and gathered again for the backward pass: its storage is
emptied and filled, so that whoever saved it for backward finds it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.tensor.pieces import PieceGraph, Route
from meshwright.tensor.products import add_to_grad
from meshwright.tensor.wires import StartedCollective, Wires

Key = tuple[int, Route, int]
"""A parameter, how it is gathered, and which of its gathers: halves share one, two readers far from each other do not."""


def drop(t: Tensor) -> None:
    """Give up the memory of a tensor that will be filled again."""
    t.untyped_storage().resize_(0)


@torch.no_grad()
def refill(t: Tensor, value: Tensor) -> None:
    """Give a tensor its memory and its value again."""
    t.untyped_storage().resize_(t.numel() * t.element_size())
    t.data.copy_(value)


class WholeWeights:
    """The gathered weights of one pass forward and backward over the pieces of one or two halves."""

    def __init__(self, halves: Sequence[PieceGraph], wires: Wires, *, keep: bool) -> None:
        self._wires, self._keep = wires, keep
        self._parameters: dict[Key, nn.Parameter] = {}
        self._keys: list[list[list[Key]]] = []
        for pieces in halves:
            seen, names = Counter[tuple[int, Route]](), dict[str, Key]()
            for name, (parameter, route) in pieces.weights.items():
                names[name] = key = (id(parameter), route, seen[id(parameter), route])
                seen[id(parameter), route] += 1
                self._parameters[key] = parameter
            self._keys.append([[names[name] for name in piece.weights] for piece in pieces.pieces])
        uses = Counter(key for half in self._keys for piece in half for key in dict.fromkeys(piece))
        self._forwards, self._backwards = Counter(uses), Counter(uses)
        self._coming: dict[Key, StartedCollective] = {}
        self._whole: dict[Key, Tensor] = {}
        self._dropped: set[Key] = set()
        self._owed: list[tuple[Key, StartedCollective]] = []

    def _start(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key not in self._coming and (key not in self._whole or key in self._dropped):
                self._coming[key] = key[1].start(self._parameters[key].detach(), self._wires)

    def get(self, half: int, piece: int, *, back: bool = False) -> list[Tensor]:
        """The weights of a piece; those of the next one that reads any are started."""
        keys = self._keys[half][piece]
        self._start(keys)
        for key in keys:
            if key in self._coming:
                value = self._coming.pop(key).wait()
                if key in self._dropped:
                    refill(self._whole[key], value)
                    self._dropped.discard(key)
                else:
                    value = value.detach().clone() if value.data_ptr() == self._parameters[key].data_ptr() else value.detach()
                    self._whole[key] = value.requires_grad_(self._parameters[key].requires_grad)
        order = range(piece - 1, -1, -1) if back else range(piece + 1, len(self._keys[half]))
        ahead = next((self._keys[half][k] for k in order if self._wanted(self._keys[half][k], back)), [])
        self._start([key for key in ahead if self._left(key, back)])
        return [self._whole[key] for key in keys]

    def _wanted(self, keys: Sequence[Key], back: bool) -> bool:
        return any(self._left(key, back) for key in keys)

    def _left(self, key: Key, back: bool) -> bool:
        """Will it be read again in this pass?"""
        return (self._backwards if back else self._forwards)[key] > 0

    def forwarded(self, half: int, piece: int) -> None:
        """A piece has run; what nobody reads any more in this pass is dropped."""
        for key in dict.fromkeys(self._keys[half][piece]):
            self._forwards[key] -= 1
            if not self._forwards[key] and not self._keep:
                drop(self._whole[key])
                self._dropped.add(key)

    def backwarded(self, half: int, piece: int) -> None:
        """The weight gradients of a piece are there: those that are complete are scattered, and awaited a piece later."""
        new = 0
        for key in dict.fromkeys(self._keys[half][piece]):
            self._backwards[key] -= 1
            if not self._backwards[key]:
                whole = self._whole.pop(key)
                if whole.grad is not None:
                    self._owed.append((key, key[1].start_back(whole.grad, self._wires)))
                    new += 1
        if new:
            self.settle(new)

    def settle(self, left: int = 0) -> None:
        """Wait for gradients that are under way, but for the last few."""
        while len(self._owed) > left:
            key, pending = self._owed.pop(0)
            add_to_grad(self._parameters[key], pending.wait())
