"""Parameters that are not plain dense tensors: transposed, channels_last, with a gap, complex, or without elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright import parallelize
from tests.conftest import Pool

WIDTH, CLASSES, STEPS = 6, 3, 3


class Strided(nn.Module):
    """A transposed matrix, a channels_last tensor, columns of a larger tensor, and a transposed buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.cl = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.gap = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, :WIDTH])
        self.register_buffer("turned", torch.randn(WIDTH, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, self.w) @ self.gap @ self.turned * self.cl[0, 1, 0, 1] + self.cl[1, :, 0].sum())


def strided() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Strided(), nn.Linear(WIDTH, WIDTH), Strided(), nn.Linear(WIDTH, CLASSES)]


def batch(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=drawn), torch.randint(0, CLASSES, (rows,), generator=drawn)


def everywhere(plan: dict[str, Any], rate: float) -> list[Tensor]:
    """The state of the whole model on this rank after training."""
    layers = strided()
    optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=rate, momentum=0.9)
    with parallelize(layers, batch(0), plan, optimizer=optimizer, loss=functional.cross_entropy, device="cpu") as session:
        session.train([batch(step) for step in range(STEPS)])
        session.broadcast_weights()
    return [t.detach() for t in nn.ModuleList(layers).state_dict().values()]


PLANS: list[dict[str, Any]] = [
    {"dp": 2, "dp_mode": "cyclic"},
    {"dp": 2, "dp_mode": "cyclic-zero"},
    {"dp": 2, "dp_mode": "zero-3", "options": {"chunks": 2}},
    {"pp": 2, "microbatches": 2, "dp_mode": "zero-1", "schedule": "chimera"},
    {"pp": 2, "microbatches": 2},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_rank_gets_the_values_whatever_the_strides(plan: dict[str, Any], pool: Pool) -> None:
    start = [t.detach() for t in nn.ModuleList(strided()).state_dict().values()]
    for found in pool.run(everywhere, plan, 0.0, ranks=2):
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, start, strict=True))


def test_owned_parameters_train_as_held_ones_to_the_last_bit(pool: Pool) -> None:
    held, owned = (pool.run(everywhere, {"dp": 2, "dp_mode": mode}, 0.1, ranks=2) for mode in ("cyclic", "cyclic-zero"))
    start = [t.detach() for t in nn.ModuleList(strided()).state_dict().values()]
    assert not torch.equal(held[0][0], start[0])
    for found in (*held, *owned):
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, held[0], strict=True))
