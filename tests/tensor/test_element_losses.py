"""Losses of elements under tensor modes keep their arguments; products add what `addmm` is given, and know turned weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.sharded import Request, box, declared_words, grid, line, parity, reference

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "squares": functional.mse_loss,
    "absolute": lambda y, t: functional.l1_loss(y, t, reduction="sum") / 64,
    "smooth": lambda y, t: functional.smooth_l1_loss(y, t, beta=0.25),
    "huber": lambda y, t: functional.huber_loss(y, t, delta=0.25),
    "binary": lambda y, t: functional.binary_cross_entropy_with_logits(y, t.sigmoid()),
    "weighted": lambda y, t: functional.binary_cross_entropy_with_logits(y, t.sigmoid(), pos_weight=torch.arange(8.0).double()),
}


class Regression(nn.Module):
    """Two products, the second added to its input, and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Parameter(torch.randn(32, 16) / 6), nn.Linear(16, 8)
        self.offset, self.square = nn.Parameter(torch.rand(1)), nn.Parameter(torch.randn(16, 16) / 4)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        wide = torch.tanh(self.up(x))
        x = torch.addmm(x, wide, self.down)
        x = torch.addmm(self.offset, torch.tanh(self.up(x)), self.down)
        x = x @ self.square.permute(0, 1) + x @ self.square.permute(1, 0) + x @ self.square.transpose(0, -2)
        return self.loss(self.head(x), labels)


@pytest.mark.parametrize(
    "asked", [line(2), box(2, 2, 1), *(pytest.param(m, marks=pytest.mark.slow) for m in (box(1, 2, 2), grid(2)))], ids=str
)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_their_arguments(name: str, asked: Request) -> None:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(8, 16, dtype=torch.float64, generator=random),
        "labels": torch.randn(8, 8, dtype=torch.float64, generator=random),
    }
    found = parity(reference(Regression(LOSSES[name]), batch), asked)
    assert found.loss <= 1e-12 and found.gradient <= 1e-12, found
    assert found.words == declared_words(found.settled)
