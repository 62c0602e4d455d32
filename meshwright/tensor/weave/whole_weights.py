"""Gathers the weights of a run in pieces: once for all halves and one piece early. Scatters their gradients one piece later.

If shards are kept, the storage of a gathered weight is freed after its last reader and filled again for the backward. The tensor
object stays the same, because autograd has saved it. In mixed precision a weight is cast before it is gathered, and its gradient
is summed and scattered in the dtype of the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.tensor.weave.pieces import PieceGraph, Route
from meshwright.tensor.weave.split_product import Job, add_to_grad
from meshwright.tensor.wires.wires import StartedCollective, Wires

Key = tuple[int, Route, int]
"""A parameter, its route, and the number of the gather: halves share a gather, readers far from each other do not."""


def drop(t: Tensor) -> None:
    """Frees the storage of a tensor that will be filled again."""
    t.untyped_storage().resize_(0)


@torch.no_grad()
def refill(t: Tensor, value: Tensor) -> None:
    """Allocates the storage of a tensor again and fills it. The tensor may be a slice of its storage."""
    last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
    t.untyped_storage().resize_(int(t.storage_offset() + last + 1) * t.element_size())
    t.data.copy_(value)


class WholeWeights:
    """The gathered weights of one pass forward and backward over the pieces of one or two halves."""

    def __init__(self, halves: Sequence[PieceGraph], wires: Wires, *, keep: bool) -> None:
        self._wires, self._keep = wires, keep
        self.dtype: torch.dtype | None = None
        """The dtype that products compute in, if it is not that of their weights."""
        self._parameters: dict[Key, nn.Parameter] = {}
        self._narrow: set[Key] = set()
        self._keys: list[list[list[Key]]] = []
        for pieces in halves:
            seen, names = Counter[tuple[int, Route]](), dict[str, Key]()
            for name, moved in pieces.weights.items():
                parameter, route = moved.parameter, moved.route
                names[name] = key = (id(parameter), route, seen[id(parameter), route])
                seen[id(parameter), route] += 1
                self._parameters[key] = parameter
                if moved.narrow:
                    self._narrow.add(key)
            self._keys.append([[names[name] for name in piece.weights] for piece in pieces.pieces])
        uses = Counter(key for half in self._keys for piece in half for key in dict.fromkeys(piece))
        self._forwards, self._inputs, self._backwards = Counter(uses), Counter(uses), Counter(uses)
        self._coming: dict[Key, StartedCollective] = {}
        self._whole: dict[Key, Tensor] = {}
        self._of: dict[int, Key] = {}
        self._dropped: set[Key] = set()
        self._sums: dict[Key, Tensor] = {}
        self._owed: list[tuple[Key, StartedCollective]] = []
        self.reached: set[int] | None = None
        """Collects the ids of parameters that get a gradient, if it is not None."""

    def _start(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key not in self._coming and (key not in self._whole or key in self._dropped):
                part = self._parameters[key].detach()
                if self.dtype is not None and key in self._narrow:
                    part = part.to(self.dtype)
                self._coming[key] = key[1].start(part, self._wires)

    def get(self, half: int, piece: int, *, back: bool = False) -> list[Tensor]:
        """Returns the weights of a piece, and starts to gather those of the next piece that has any."""
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
                    self._of[id(value)] = key
        order = range(piece - 1, -1, -1) if back else range(piece + 1, len(self._keys[half]))
        ahead = next((self._keys[half][k] for k in order if self._wanted(self._keys[half][k], back)), [])
        self._start([key for key in ahead if self._left(key, back)])
        return [self._whole[key] for key in keys]

    def _wanted(self, keys: Sequence[Key], back: bool) -> bool:
        return any(self._left(key, back) for key in keys)

    def _left(self, key: Key, back: bool) -> bool:
        """Whether it will be read again in this pass."""
        return (self._inputs if back else self._forwards)[key] > 0

    def forwarded(self, half: int, piece: int) -> None:
        """Called after the forward of a piece. Drops weights that are not read again in this pass."""
        for key in dict.fromkeys(self._keys[half][piece]):
            self._forwards[key] -= 1
            if not self._forwards[key] and not self._keep:
                drop(self._whole[key])
                self._dropped.add(key)

    def read_back(self, half: int, piece: int) -> None:
        """Called after the input gradients of a piece. Drops weights that are not read again; weight gradients need none."""
        for key in dict.fromkeys(self._keys[half][piece]):
            self._inputs[key] -= 1
            if not self._inputs[key]:
                drop(self._whole[key])

    @torch.no_grad()
    def work(self, jobs: list[Job]) -> None:
        """Computes deferred weight gradients."""
        for job, weight in jobs:
            gradient, key = job(), self._of.get(id(weight))
            if key is None:  # a parameter that is not gathered
                self._note(weight)
                add_to_grad(weight, gradient)
            elif key in self._sums:
                self._sums[key] += gradient
            else:
                self._sums[key] = gradient.to(self._parameters[key].dtype)
        jobs.clear()

    def backwarded(self, half: int, piece: int) -> None:
        """Called after the weight gradients of a piece. Scatters those that are complete; they are awaited one piece later."""
        new = 0
        for key in dict.fromkeys(self._keys[half][piece]):
            self._backwards[key] -= 1
            if not self._backwards[key]:
                whole, gradient = self._whole.pop(key), self._sums.pop(key, None)
                del self._of[id(whole)]
                if whole.grad is not None:  # from readers that are not products
                    gradient = whole.grad if gradient is None else gradient + whole.grad
                if gradient is not None:
                    self._owed.append((key, key[1].start_back(gradient, self._wires)))
                    new += 1
        if new:
            self.settle(new)

    def settle(self, left: int = 0) -> None:
        """Waits for started gradients, except for the last few."""
        while len(self._owed) > left:
            key, pending = self._owed.pop(0)
            self._note(self._parameters[key])
            add_to_grad(self._parameters[key], pending.wait())

    def _note(self, parameter: Tensor) -> None:
        if self.reached is not None:
            self.reached.add(id(parameter))
