"""A parameter that no backward reaches has no gradient, as in torch: weight decay and momentum leave it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright import parallelize
from tests.conftest import Pool

WIDTH, CLASSES, STEPS = 8, 5, 3


class Partly(nn.Module):
    """Features without a gradient, a matrix that only its second use learns through, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        with torch.no_grad():
            x = self.features(x)
        x = x @ self.shared.detach()
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = (x @ self.shared) * (self.gate > 0)
        return (functional.cross_entropy(self.head(x), labels),)


def batch(step: int, rows: int = 8) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return {"x": torch.randn(rows, WIDTH, generator=drawn), "labels": torch.randint(0, CLASSES, (rows,), generator=drawn)}


def decaying(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5)


def on_rank(plan: Mapping[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """The weights after some steps, and the parameters that the optimizer keeps something for."""
    model = Partly()
    with parallelize(model, batch(0), plan, optimizer=decaying(model.parameters())) as session:
        for step in range(STEPS):
            session.step(batch(step))
        found = session.state_dict()["tensors"]
    names = {key.rpartition("/")[2] for key in found if key.startswith("optimizer/")}
    return {key.removeprefix("model/"): t for key, t in found.items() if key.startswith("model/")}, names


PLANS: list[dict[str, Any]] = [
    {"pp": 1, "microbatches": 2},
    {"pp": 2, "microbatches": 4},
    {"pp": 2, "schedule": "chimera", "microbatches": 2},
    {"pp": 2, "schedule": "zero_bubble", "microbatches": 4},
    {"pp": 2, "microbatches": 4, "recompute": "inline"},
    {"pp": 2, "schedule": "chimera", "microbatches": 2, "sync": "ring"},
    {"dp": 2, "microbatches": 2},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_torch_leaves_alone_is_left_alone(plan: dict[str, Any], pool: Pool) -> None:
    plain = Partly()
    optimizer = decaying(plain.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(**batch(step))[0].backward()
        optimizer.step()
    wanted = {name: p for name, p in plain.named_parameters() if not name.startswith("unused")}
    trained = {name for name, p in wanted.items() if p.grad is not None}
    assert not trained & {"features.0.weight", "features.0.bias", "gate"} and "shared" in trained
    for weights, kept in pool.run(on_rank, plan, ranks=plan.get("pp", 1) * plan.get("dp", 1)):
        assert kept == trained
        for name, p in wanted.items():
            torch.testing.assert_close(weights[name], p.detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("schedule", ["onef1b", "chimera", "zero_bubble", "pipedream", "pipedream_2bw"])
def test_a_plan_and_one_process_agree_on_it(schedule: str, pool: Pool) -> None:
    microbatches = 1 if schedule == "pipedream" else 4
    plan: dict[str, Any] = {"pp": 2, "schedule": schedule, "microbatches": microbatches}
    assert pool.verify(Partly, batch, **plan, steps=4, optimizer=decaying).passed


class Sometimes(nn.Module):
    """A layer that is left out at the first call, in a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.linear(x) if self.calls > 1 else x + 0.0


def test_what_is_reached_later_is_trained() -> None:
    """What a first backward reached is no promise where forwards are Python: what has a gradient is trained."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Sometimes(), nn.Linear(WIDTH, WIDTH)]
    before = layers[1].linear.weight.detach().clone()
    x = torch.randn(4, WIDTH)
    every = [p for layer in layers for p in layer.parameters()]
    with parallelize(layers, (x, x), {"pp": 1}, optimizer=torch.optim.SGD(every, lr=0.1)) as session:
        session.step((x, x))
        session.step((x, x))
    assert not torch.equal(layers[1].linear.weight, before)


class Chooses(nn.Module):
    """A layer of a list that uses one of two parameters, by the sign of its first row."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.plus = nn.Parameter(torch.full((WIDTH,), 0.5)), nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.times if float(x.detach()[0, 0]) > 0 else x + self.plus


SIGNS = [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
"""Which parameter each half of the rows of a step uses."""


def signed(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x = torch.randn(8, WIDTH, generator=drawn, dtype=torch.float64).abs()
    return x * torch.tensor(SIGNS[step]).repeat_interleave(4)[:, None], torch.randint(0, CLASSES, (8,), generator=drawn)


def choosing() -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.double() for layer in (Chooses(), nn.Linear(WIDTH, WIDTH), Chooses(), nn.Linear(WIDTH, CLASSES))]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5)


def chosen(plan: Mapping[str, Any]) -> list[Tensor]:
    layers = choosing()
    optimizer, loss = momentum(nn.ModuleList(layers).parameters()), functional.cross_entropy
    with parallelize(layers, signed(0), plan, optimizer=optimizer, loss=loss, device="cpu") as session:
        session.train([signed(step) for step in range(len(SIGNS))])
        session.broadcast_weights()
    return [p.detach() for p in nn.ModuleList(layers).parameters()]


CHOICES: list[dict[str, Any]] = [
    {"pp": 1, "microbatches": 2},
    {"dp": 2},
    {"dp": 2, "dp_mode": "zero-1"},
    {"dp": 2, "dp_mode": "zero-2"},
    {"dp": 2, "dp_mode": "zero-3", "options": {"chunks": 2}},
    {"pp": 2, "microbatches": 2},
    {"pp": 2, "microbatches": 2, "schedule": "zero_bubble"},
    {"pp": 2, "microbatches": 2, "recompute": "inline"},
    {"pp": 2, "microbatches": 2, "schedule": "chimera", "sync": "ring"},
]


@pytest.mark.parametrize("plan", CHOICES, ids=str)
def test_a_step_whose_rows_do_not_reach_a_parameter_leaves_it_alone(plan: dict[str, Any], pool: Pool) -> None:
    layers = choosing()
    plain, optimizer = nn.Sequential(*layers), momentum(nn.ModuleList(layers).parameters())
    for step in range(len(SIGNS)):
        optimizer.zero_grad()
        x, target = signed(step)
        for rows in (slice(0, 4), slice(4, 8)):
            (functional.cross_entropy(plain(x[rows]), target[rows]) / 2).backward()
        optimizer.step()
    for found in pool.run(chosen, plan, ranks=plan.get("pp", 1) * plan.get("dp", 1)):
        for mine, wanted in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["cyclic", "cyclic-zero", "cyclic-pp", "cyclic-mp"])
def test_cyclic_forms_leave_it_alone_too(mode: str, pool: Pool) -> None:
    assert pool.verify(
        choosing, signed, dp=2, dp_mode=mode, steps=len(SIGNS), optimizer=momentum, loss=functional.cross_entropy
    ).passed
