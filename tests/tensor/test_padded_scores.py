"""Scores of a number of classes that does not divide: what is computed with their padding stays finite, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.sharded import Request, box, declared_words, grid, line, parity, reference

CLASSES = 7
Work = Callable[[Tensor, Tensor], Tensor]
WORK: dict[str, Work] = {
    "square root": lambda z, prior: z.sign() * z.abs().sqrt(),
    "logarithm": lambda z, prior: z.square().log(),
    "power": lambda z, prior: z.abs().pow(0.3),
    "shares of columns": lambda z, prior: z.sigmoid() / z.sigmoid().sum(0, keepdim=True),
    "inverse": lambda z, prior: 1 / (3 * z),
    "logarithm of a parameter": lambda z, prior: z + prior.log(),
    "dropout of everything": lambda z, prior: z + functional.dropout(z, 1.0),
    "division by a number": lambda z, prior: 30 * torch.tanh(z / 30),
}


class Scored(nn.Module):
    """Scores, some work on them, and the loss."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, CLASSES)
        self.prior = nn.Parameter(torch.rand(CLASSES) + 0.5)
        self.work = work

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.work(self.head(self.down(torch.tanh(self.up(x)))), self.prior), labels)


@pytest.mark.parametrize(
    "asked", [line(2), box(1, 2, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in (box(2, 2, 1), grid(2)))]
)
@pytest.mark.parametrize("name", WORK)
def test_padding_stays_finite(name: str, asked: Request) -> None:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(8, 16, dtype=torch.float64, generator=random),
        "labels": torch.randint(0, CLASSES, (8,), generator=random),
    }
    found = parity(reference(Scored(WORK[name]), batch), asked)
    assert found.loss <= 1e-12 and found.gradient <= 1e-12, found
    assert found.words == declared_words(found.settled)
    assert found.settled.cuts["head.weight"].layout[0][0].real == CLASSES
