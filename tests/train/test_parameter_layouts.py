"""Parameters that are not plain dense tensors: transposed, channels_last, on shared memory, complex, or without elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright import MeshwrightError, parallelize
from meshwright.runtime.engine.shared_storage import _pairs
from meshwright.train.checkpoint.write import Checkpoints
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


class Aliased(nn.Module):
    """Two parameters on one memory, or on parts of it from the element `start` on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        base = torch.randn(WIDTH * 2)
        self.w, self.v = nn.Parameter(base[:WIDTH]), nn.Parameter(base[start : start + WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.w + self.v.sin())


def aliased(plan: dict[str, Any] | None, start: int) -> list[Tensor]:
    """The weights after training: by a plan, or in plain torch."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Aliased(start), nn.Linear(WIDTH, CLASSES)]
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=0.1)
    if plan is None:
        for step in range(STEPS):
            optimizer.zero_grad()
            x, target = batch(step)
            functional.cross_entropy(nn.Sequential(*layers)(x), target).backward()
            optimizer.step()
    else:
        with parallelize(layers, batch(0), plan, optimizer=optimizer, loss=functional.cross_entropy, device="cpu") as session:
            session.train([batch(step) for step in range(STEPS)])
    return [p.detach() for p in nn.ModuleList(layers).parameters()]


def refused(plan: dict[str, Any], start: int) -> str:
    with pytest.raises(MeshwrightError) as error:
        aliased(plan, start)
    return str(error.value)


@pytest.mark.parametrize("mode", ["zero-1", "zero-2", "zero-3", "cyclic", "cyclic-zero"])
@pytest.mark.parametrize("start", [0, WIDTH // 2])
def test_parameters_on_one_memory_are_refused_by_name(mode: str, start: int, pool: Pool) -> None:
    plan: dict[str, Any] = {"dp": 2, "dp_mode": mode} | ({"options": {"chunks": 2}} if mode == "zero-3" else {})
    for said in pool.run(refused, plan, start, ranks=2):
        assert "1.w and 1.v share memory" in said and ".clone()" in said


def test_parameters_on_one_memory_train_as_in_torch_where_one_update_changes_both(pool: Pool) -> None:
    for start, plan in ((0, {"dp": 2}), (WIDTH // 2, {"dp": 2}), (WIDTH, {"dp": 2, "dp_mode": "zero-1"})):
        for found in pool.run(aliased, plan, start, ranks=2):
            for mine, wanted in zip(found, aliased(None, start), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_columns_of_one_tensor_without_common_elements_do_not_share_memory() -> None:
    base = torch.zeros(4, 6)
    assert not list(_pairs([nn.Parameter(base[:, :3]), nn.Parameter(base[:, 3:])]))
    assert list(_pairs([nn.Parameter(base[:, :4]), nn.Parameter(base[:, 3:])]))
    assert list(_pairs([nn.Parameter(base), base.view(-1)[5:7]])) and not list(_pairs([base, base.view(-1)]))


class Complex(nn.Module):
    """A complex matrix, whose gradient is mostly imaginary."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w).imag * 3.0


def clipped(plan: dict[str, Any] | None) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(0)
    layers = [Complex(), nn.Linear(WIDTH, CLASSES).double()]
    optimizer, norms = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1), []
    batches = [(x.double(), target) for x, target in map(batch, range(STEPS))]
    if plan is None:
        for x, target in batches:
            optimizer.zero_grad()
            functional.cross_entropy(nn.Sequential(*layers)(x), target).backward()
            norms.append(float(nn.utils.clip_grad_norm_(nn.ModuleList(layers).parameters(), 0.2)))
            optimizer.step()
    else:
        loss = functional.cross_entropy
        with parallelize(layers, batches[0], plan, optimizer=optimizer, loss=loss, clip=0.2, device="cpu") as session:
            norms = [result.grad_norm for result in session.train(batches)]
    return [p.detach() for p in nn.ModuleList(layers).parameters()], norms


@pytest.mark.parametrize("mode", ["replicated", "zero-1", "zero-2"])
def test_the_norm_of_complex_gradients_counts_both_parts(mode: str, pool: Pool) -> None:
    weights, norms = clipped(None)
    assert min(norms) > 0.2
    for found, mine in pool.run(clipped, {"dp": 2, "dp_mode": mode}, ranks=2):
        assert mine == pytest.approx(norms, rel=1e-9)
        for one, wanted in zip(found, weights, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-9)


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.e = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.e.sum())


def moved(plans: list[dict[str, Any]], folder: str) -> list[Tensor]:
    """The weights after training by one plan after another, with a checkpoint in between."""
    for number, plan in enumerate(plans):
        torch.manual_seed(0)
        layers = [Empty(), Empty(), nn.Linear(WIDTH, CLASSES)]
        optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1, momentum=0.9)
        with parallelize(layers, batch(0), plan, optimizer=optimizer, loss=functional.cross_entropy, device="cpu") as session:
            saved = Checkpoints(Path(folder), session.engine)
            if number:
                saved.resume()
                session.load_state_dict(session.state_dict())
            session.train([batch(2 * number), batch(2 * number + 1)])
            saved.save(2 * number + 2)
            saved.close()
            session.broadcast_weights()
    return [p.detach() for p in nn.ModuleList(layers).parameters()]


@pytest.mark.parametrize("path", [("replicated", "zero-3"), ("zero-3", "replicated"), ("zero-1", "zero-2"), ("zero-2", "zero-3")])
def test_a_checkpoint_with_a_parameter_without_elements_moves(path: tuple[str, str], pool: Pool, tmp_path: Path) -> None:
    def plan(mode: str) -> dict[str, Any]:
        return {"dp": 2, "dp_mode": mode} | ({"options": {"chunks": 2}} if mode == "zero-3" else {})

    whole = pool.run(moved, [plan("replicated")] * 2, str(tmp_path / "whole"), ranks=2)[0]
    for found in pool.run(moved, [plan(mode) for mode in path], str(tmp_path / "moved"), ranks=2):
        for mine, wanted in zip(found, whole, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
