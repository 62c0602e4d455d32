"""What the last stages of a rank saw of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tally:
    """Losses, how many times each counts in their sum, and the weight of that."""

    losses: list[Tensor] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    weight: float = 0.0

    @property
    def loss(self) -> Tensor | float:
        """The sum of all losses."""
        terms = [(loss * times).double() for loss, times in zip(self.losses, self.times, strict=True)]
        return torch.stack(terms).sum() if terms else 0.0

    def add(self, loss: Tensor, times: float, weight: float) -> None:
        """Add the loss of some rows, which counts so many times."""
        self.losses.append(loss)
        self.times.append(times)
        self.weight += weight
