"""Dropout of one rank's part: numbers are drawn for the whole tensor, from the same stream on all ranks, and the part is taken.

So masks are those of a run in one process, differ between elements, and repeat when a forward pass is repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.costs.scheme import Axes
from meshwright.tensor.wires import Wires


class GlobalDropout(nn.Module):
    """Drops elements; `factors` are the sizes of the whole tensor and the axes that cut them, in order.

    `generator` is the stream to draw from, torch's own if it is None.
    """

    def __init__(self, rate: float, factors: tuple[tuple[int, Axes], ...], shape: tuple[int, ...], wires: Wires) -> None:
        super().__init__()
        self.rate, self.factors, self.shape, self.wires = rate, factors, shape, wires
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """What is left, scaled."""
        if not self.training or not self.rate:
            return x
        noise = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        noise.bernoulli_(1 - self.rate, generator=self.generator).div_(1 - self.rate)
        noise = noise.reshape([size for size, _ in self.factors])
        for dim, (_, axes) in enumerate(self.factors):
            for axis in axes:
                noise = self.wires.part(noise, axis, dim)
        return x * noise.reshape(x.shape)
