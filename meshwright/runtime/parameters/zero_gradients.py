"""ZeRO gradients: each holder of a divided unit gets the sum of its own slices.

    whole gradients   [ g0 ........ | g1 .. | g2 ............... | pad ]   in the layout of the parameters (`zero_shares.py`)
    slices            [ sum of this holder's slice ]                       what its optimizer reads
    end               [ reached p0 | reached p1 | ... | weight | divided ] summed on its own, whole on every holder

Whole gradients are summed once per round (zero-1), or after every backward (zero-2). In the second case their memory is freed
after each sum, so that a rank never has the whole gradients of more than one unit, and of the units tied to it.
"""

from __future__ import annotations

import torch

from meshwright.runtime.parameters.gradient_buffer import Adder, Buffer, carrier_of
from meshwright.runtime.parameters.zero_shares import Shares


class SlicedBuffer(Buffer):
    """The gradients of one round. The last of `flats` is the end; the others are whole gradients, if they are open."""

    def __init__(self, shares: Shares) -> None:
        params = shares.params
        end = torch.zeros(len(params) + 2, dtype=carrier_of(params), device=params[0].device)
        super().__init__([end], [])
        self.params, self.shares = params, shares
        self.slices = [empty.zero_() for empty in shares.slices()]

    @property
    def count(self) -> int:
        """The number of parameters."""
        return len(self.params)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The parts of this rank's slices that belong to its pieces of parameters."""
        return [
            self.slices[piece.span.flat].narrow(0, piece.span.at, piece.parameter.numel()).view_as(piece.parameter)
            for piece in self.shares.pieces
        ]

    def whole_gradients(self) -> list[torch.Tensor]:
        """Returns the gradient of each parameter, put together from the slices of all holders."""
        return self.shares.joined(self.slices)

    @property
    def sum_tensors(self) -> list[torch.Tensor]:
        """This rank's slices of the sum."""
        return self.slices

    def open(self) -> None:
        """Makes room for whole gradients, which backwards add to."""
        if not self.views:
            flats = [torch.zeros_like(flat) for flat in self.shares.flats]
            self.views, self.flats = self.shares.views(flats), [*flats, self.flats[-1]]

    def start(self, adder: Adder | None) -> None:
        """Starts to sum over all holders, without waiting."""
        self.open()
        self._note_reached()
        self.seal()
        self.sums.extend(self.shares.start_scatter(self.flats[:-1], self.slices))
        if adder is not None:
            self.sums.extend(adder.start(self.flats[-1:]))

    def add(self, adder: Adder | None, *, last: bool) -> None:
        """Sums the gradients of one backward over all holders, adds them to the slices, and frees the whole gradients.

        The last of a round starts to sum the end.
        """
        self.open()
        self._note_reached()
        parts = self.shares.slices()
        for work in self.shares.start_scatter(self.flats[:-1], parts):
            work.wait()
        for mine, more in zip(self.slices, parts, strict=True):
            mine.add_(more)
        self.flats, self.views = self.flats[-1:], []
        for parameter in self.params:
            parameter.grad = None
        if last:
            self.seal()
            if adder is not None:
                self.sums.extend(adder.start(self.flats))

    def absent(self) -> list[int]:
        """Returns which pieces have no gradient."""
        missing = super().absent()
        return [i for i, piece in enumerate(self.shares.pieces) if piece.span.param in missing] if missing else []

    def is_zero(self, index: int) -> bool:
        """Returns whether the gradient of a parameter that no backward has reached is zero: others are noted as reached."""
        return True

    def clear(self) -> None:
        """Resets the buffer for the next round."""
        super().clear()
        for mine in self.slices:
            mine.zero_()

    def _note_reached(self) -> None:
        """Notes parameters with a gradient as reached. Later, a rank sees only slices."""
        self.reached |= sum(1 << i for i, view in enumerate(self.views) if not self.reached >> i & 1 and view.any())
