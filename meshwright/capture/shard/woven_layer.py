"""Sharded layers that run in pieces between asynchronous collectives. They are called like any captured layer.

A layer has one part per half of a microbatch. Without `overlap` it has one part, for all rows. Consecutive layers run as one
chain (`woven_chain.py`), so that collectives overlap with compute across the borders of layers too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.cut.stage_modules import Captured
from meshwright.capture.shard.woven_chain import BackwardSlot, WovenChain
from meshwright.costs.declared import Phase
from meshwright.costs.scheme import Save
from meshwright.tensor.global_dropout import GlobalDropout, RowWindow
from meshwright.tensor.weave.pieces import PieceGraph

CountLabels = Callable[[Mapping[str, Tensor]], float]
"""Returns the number of items that the loss of some rows counts, from their columns."""


@dataclass
class LayerPart:
    """A layer for the rows of one half, or for all rows: its graph, its pieces, and its rows."""

    layer: Captured
    pieces: PieceGraph
    window: RowWindow
    local_rows: tuple[int, ...] = field(default=())
    """For every input, the number of its local rows that belong to this half."""
    free_rows: Mapping[str, int] = field(default_factory=dict)
    """The dimension with rows of values that are computed from columns alone, if they have rows."""

    def given(self, columns: Mapping[str, Tensor], again: dict[int, Any]) -> dict[str, Any]:
        """Returns the inputs of the graph besides the outputs of the layer before it, by name, from the columns of all rows.

        `again` is a cache that the layers of a stage share.
        """
        layer = self.layer
        found = {name: self._rows(columns[name], 0) for name in layer.direct}
        own: list[Any] = list(found.values())
        if layer.prelude is not None:
            if (key := id(layer.prelude)) not in again:
                again[key] = layer.prelude(columns)
            made = {name: again[key][name] for name in layer.free}
            own += [self._rows(made[n], self.free_rows[n]) if n in self.free_rows else made[n] for n in layer.free]
        return dict(zip(self.pieces.inputs[len(self.pieces.inputs) - len(own) :], own, strict=True))

    def _rows(self, value: Tensor, dim: int) -> Tensor:
        """Returns this half's rows of a value. The rows may be merged with the dimensions after them."""
        window = self.window
        if window.rows == window.total:
            return value
        each = value.shape[dim] // window.total
        return value.narrow(dim, window.start * each, window.rows * each)

    def drops(self) -> list[GlobalDropout]:
        """The dropout modules of the graph."""
        found = [module for piece in self.pieces.pieces for module in piece.body.modules()]
        return [module for module in found if isinstance(module, GlobalDropout)]


@dataclass(frozen=True)
class HalfLosses:
    """How the losses of two halves become the loss of their microbatch."""

    count: CountLabels | None = None
    """Counts the items of a mean; None counts rows."""
    columns: tuple[str, ...] = ()
    """The columns that `count` reads."""
    adds: bool = False
    """Whether the loss is a sum."""

    def joined(self, losses: Sequence[Tensor], columns: Sequence[Mapping[str, Tensor]], rows: Sequence[int]) -> Tensor:
        """Returns the loss of all rows."""
        if self.adds:
            return torch.stack(list(losses)).sum()
        counts = [float(each) for each in rows] if self.count is None else [self.count(each) for each in columns]
        total = sum(counts) or 1.0
        sound = [loss if count else torch.nan_to_num(loss) for loss, count in zip(losses, counts, strict=True)]
        return torch.stack([loss * (count / total) for loss, count in zip(sound, counts, strict=True)]).sum()


class WovenLayer(Captured):
    """A sharded layer in pieces, of a whole microbatch or of its two halves."""

    def __init__(self, parts: Sequence[LayerPart], *, save: Save, words: Mapping[Phase, Fraction]) -> None:
        """`words` are the transfers that are declared for the layer."""
        first = parts[0].layer
        super().__init__(first.body, first.direct, first.original, inplace=False)
        if first.prelude is not None:
            self.after(first.prelude, first.free, {})
        self.parts, self.keep, self.words, self.losses = list(parts), save is Save.GATHERED, words, HalfLosses()
        self.deferred_slot = BackwardSlot()
        self._alone: WovenChain | None = None
        for number, part in enumerate(parts):  # modules that train(), eval() and to() must reach
            for k, piece in enumerate(part.pieces.pieces):
                self.add_module(f"piece_{number}_{k}", piece.body)

    def take_losses(self, losses: HalfLosses) -> None:
        """Sets how the losses of halves are combined, in the last layer of a model."""
        self.losses = losses
        self.batch_columns = tuple(dict.fromkeys((*self.batch_columns, *losses.columns)))

    @staticmethod
    def chained(layers: Sequence[WovenLayer]) -> WovenChain:
        """Returns consecutive layers as one chain."""
        return WovenChain(layers)

    def forward(self, *values: Tensor, made_again: dict[int, Any] | None = None, **columns: Tensor) -> tuple[Tensor, ...]:
        """Runs the pieces."""
        self._alone = self._alone or WovenChain([self])
        return self._alone(values, columns, again=made_again)
