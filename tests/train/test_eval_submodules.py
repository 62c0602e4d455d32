"""Submodules in evaluation: `parallelize` and `verify` train as the user's own loop does, a norm or dropout stays frozen."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from tests.conftest import Pool

Batch = tuple[Tensor, Tensor]


class Doubled(nn.Module):
    """Asks for its mode itself."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers())

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def layers() -> list[nn.Module]:
    inner = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))
    return [nn.Linear(4, 6), inner, nn.BatchNorm1d(6), nn.Dropout(0.9), Doubled(), nn.Linear(6, 1)]


def built(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = Net() if kind == "captured" else nn.Sequential(*layers()) if kind == "sequential" else layers()
    parts = model.parts if kind == "captured" else model
    parts[2].running_mean.fill_(0.3)
    for part in parts[1:5]:
        part.eval()
    return model


def data(step: int, dtype: torch.dtype = torch.float32) -> Batch:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=random).to(dtype), torch.randn(8, 1, generator=random).to(dtype)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def plain(kind: str) -> list[float]:
    """The losses of a loop of one's own."""
    model = built(kind)
    model = nn.Sequential(*model) if isinstance(model, list) else model
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        x, y = data(step)
        loss = squares(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["captured", "sequential", "list"])
def test_parts_in_evaluation_stay_there(kind: str) -> None:
    model = built(kind)
    parts = model.parts if kind == "captured" else model
    optimizer = partial(torch.optim.SGD, lr=0.1)
    norm = deepcopy(parts[2].state_dict())
    with mw.parallelize(model, data(0), {"pp": 1, "microbatches": 2}, optimizer=optimizer, loss=squares) as session:
        found = []
        for step in range(3):
            found.append(session.step(data(step)).loss)
            session.evaluate(data(step))
    assert found == pytest.approx(plain(kind), rel=1e-5)
    assert torch.equal(parts[2].running_mean, norm["running_mean"])
    assert [part.training for part in parts] == [True, False, False, False, False, True]
    assert "train" not in vars(parts[2]), "the model is as it was"
    assert parts[2].train().training


def test_a_model_in_evaluation_as_a_whole_trains() -> None:
    """As `from_pretrained` returns it."""
    model = Net().eval()
    with mw.parallelize(model, data(0), {"pp": 1}, loss=squares) as session:
        before = model.parts[2].running_mean.clone()
        session.step(data(0))
    assert not torch.equal(model.parts[2].running_mean, before)


def test_modes_are_given_back_where_parallelize_refuses() -> None:
    model = built("captured")
    with pytest.raises(mw.MeshwrightError):
        mw.parallelize(model, data(0), {"pp": 1, "stages": ["nowhere"]}, loss=squares)
    assert "train" not in vars(model.parts[2]) and not model.parts[2].training


@pytest.mark.parametrize("kind", ["captured", "list"])
def test_verify_trains_the_same_model(pool: Pool, kind: str) -> None:
    build: Callable[[], Any] = partial(built, kind)
    found = pool.verify(build, data, pp=2, microbatches=2, steps=2, loss=squares)
    assert found.passed, found.worst
