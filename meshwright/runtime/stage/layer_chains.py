"""Layers that run as one chain. Layers with collectives have a method `chained`, so that they overlap across their borders.

A chain adds gradients without autograd. Its first layer has a slot (`deferred_slot`) with requests to a backward: add
weight gradients to a list (`rest`), and the ids of parameters that it reaches to a set (`reached`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

Found = TypeVar("Found")


class ChainedLayers(Protocol):
    """Runs several layers."""

    def __call__(
        self,
        values: Sequence[Tensor],
        columns: Mapping[str, Tensor],
        *,
        seeds: Sequence[int] | None = None,
        draw: Callable[[int], object] | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns the output of the last layer. Each layer draws random numbers from its own seed."""
        ...


class Chains:
    """The chains of a stage: one for each range of its layers that runs at once."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        makers = [getattr(layer, "chained", None) for layer in layers]
        self._make = makers[0] if all(makers) else None
        self._slots: list[Any] = [layer.deferred_slot for layer in layers] if self._make is not None else []
        self._made: dict[range, ChainedLayers] = {}

    def of(self, which: range) -> ChainedLayers | None:
        """Returns the chain of some layers; None if they run one after another."""
        if self._make is None or not which:
            return None
        if which not in self._made:
            self._made[which] = self._make([self.layers[index] for index in which])
        return self._made[which]

    def noting(self, reached: set[int], backward: Callable[[], Found]) -> Found:
        """Runs a backward. Adds the ids of the parameters that chains add gradients to."""
        for slot in self._slots:
            slot.reached = reached
        try:
            return backward()
        finally:
            for slot in self._slots:
                slot.reached = None
