"""Dropout on a shard: every rank draws the numbers of the whole tensor from the same stream and uses those of its shard.

Masks are therefore equal to those in one process, and a repeated forward uses the same mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.costs.scheme import Axes
from meshwright.tensor.wires.wires import Wires


@dataclass(frozen=True, slots=True)
class RowWindow:
    """The rows of a half among those of its microbatch."""

    start: int
    rows: int
    total: int


class GlobalDropout(nn.Module):
    """Drops elements. `factors` are the sizes of the whole tensor and the axes that cut them, in order.

    `generator` is the stream to draw from, by default that of torch. With a `window`, numbers are drawn for all rows of a
    microbatch (dimension `rows_dim`), and those of the window are used.
    """

    def __init__(
        self,
        rate: float,
        factors: tuple[tuple[int, Axes], ...],
        shape: tuple[int, ...],
        wires: Wires,
        *,
        rows_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.rate, self.factors, self.shape, self.wires, self.rows_dim = rate, factors, shape, wires, rows_dim
        self.generator: torch.Generator | None = None
        self.window: RowWindow | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the kept elements, scaled, and zeros for the others."""
        if not self.training or not self.rate:
            return x
        if self.rate == 1:
            return x * 0.0
        noise = self._noise(x).reshape([size for size, _ in self.factors])
        for dim, (_, axes) in enumerate(self.factors):
            for axis in axes:
                noise = self.wires.part(noise, axis, dim)
        return x * noise.reshape(x.shape)

    def _noise(self, x: Tensor) -> Tensor:
        shape, dim, window = list(self.shape), self.rows_dim, self.window
        if window is not None and dim is not None:
            shape[dim] = shape[dim] // window.rows * window.total
        noise = torch.empty(shape, dtype=x.dtype, device=x.device)
        noise.bernoulli_(1 - self.rate, generator=self.generator).div_(1 - self.rate)
        if window is not None and dim is not None:
            noise = noise.narrow(dim, self.shape[dim] // window.rows * window.start, self.shape[dim])
        return noise
