"""Writes in place: captured layers leave the same loss, gradients and buffers as the model, wherever they are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright import MeshwrightError
from meshwright.capture.trace.export import flatten
from meshwright.train.setup.captured_layers import through
from tests.support.layers_of_models import layers_for
from tests.support.writing_models import made

Found = dict[str, Tensor]


def _gathered(model: nn.Module, loss: Tensor) -> Found:
    found = {"loss": loss.detach().clone(), **{f"buffer {n}": b.clone() for n, b in model.named_buffers()}}
    loss.backward()
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _worst(a: Found, b: Found) -> float:
    assert a.keys() == b.keys()
    if any(not torch.equal(a[n].isnan(), b[n].isnan()) for n in a):
        return float("inf")
    differences = [float((a[n] - b[n]).nan_to_num().abs().max() / (1e-3 + a[n].nan_to_num().abs().max())) for n in a]
    return max(differences)


def _compare(seed: int) -> float | None:
    """The largest difference over cuts into 1, 2 and 4 stages; None where the model itself cannot run."""
    model, batch = made(seed)
    start = {name: t.clone() for name, t in model.state_dict().items()}
    try:
        wanted = _gathered(model, model(**batch())[0])
    except (RuntimeError, IndexError):
        return None  # the program itself does not run
    model.load_state_dict(start)
    try:
        flat = flatten(model, batch())
    except MeshwrightError as error:
        assert "uses the .data of a tensor" in str(error) or "depends on the number of rows" in str(error)
        return None
    worst = 0.0
    for stages in (1, 2, 4):
        model.load_state_dict(start)
        model.zero_grad(set_to_none=True)
        try:
            layers = layers_for(model, batch(), stages, flat=flat)
        except MeshwrightError as error:
            assert "cannot be cut" in str(error)
            continue
        worst = max(worst, _worst(wanted, _gathered(model, through(layers, batch())[0])))
    return worst


@pytest.mark.parametrize("seed", range(24))
def test_programs_with_views_and_writes(seed: int) -> None:
    found = _compare(seed)
    assert found is None or found < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_programs_with_views_and_writes(block: int) -> None:
    found = {seed: _compare(seed) for seed in range(1000 + 150 * block, 1150 + 150 * block)}
    assert {seed: worst for seed, worst in found.items() if worst is not None and worst >= 1e-5} == {}
    assert sum(worst is not None for worst in found.values()) > 30, "most others fail by themselves"


class _Shifted(nn.Module):
    """Labels shifted to the right in place, as mBART makes the input of its decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, labels: Tensor) -> tuple[Tensor]:
        shifted = labels.clone()
        shifted.masked_fill_(shifted == 3, 1)
        shifted[:, 0] = 5
        return (F.cross_entropy(self.head(self.embed(shifted)).flatten(0, 1), labels.flatten()),)


class _Average(nn.Module):
    """A moving average that is kept without a gradient, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        h = self.first(x)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return (F.mse_loss(self.last(h - self.average), labels),)


class _Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.seen = nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        self.seen.add_(1)
        return (F.mse_loss(self.first(x) + self.seen, labels),)


def _numbers() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8), "labels": torch.randn(4, 8)}


def test_a_write_behind_an_embedding() -> None:
    torch.manual_seed(0)
    model, batch = _Shifted(), {"labels": torch.randint(0, 11, (4, 6))}
    layers = layers_for(model, batch, 2)
    assert torch.equal(through(layers, batch)[0], model(**batch)[0])


@pytest.mark.parametrize("training", [True, False])
def test_an_average_without_a_gradient(training: bool) -> None:
    torch.manual_seed(0)
    model, batch = _Average(), _numbers()
    layers = layers_for(model, batch, 2)
    for module in (model, *layers.modules):
        module.train(training)
    loss = model(**batch)[0]
    wanted = model.average.clone()
    model.average.zero_()
    assert torch.equal(through(layers, batch)[0], loss)
    assert torch.equal(model.average, wanted) and bool(wanted.any()) == training


def test_a_changed_tensor_that_is_no_buffer() -> None:
    with pytest.raises(MeshwrightError, match="'seen' in place, a tensor that is neither a parameter nor a buffer"):
        flatten(_Kept(), _numbers())


class _Clamped(nn.Module):
    """Weights clipped by the forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return (F.mse_loss(self.first(x), labels),)


def test_a_write_into_a_parameter() -> None:
    with pytest.raises(MeshwrightError, match=r"writes into the parameter 'first\.weight'"):
        flatten(_Clamped(), _numbers())


class Undropped(nn.Module):
    """Without anything to drop, dropout returns the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        F.dropout(self.seen, 0.0).add_(1.0)
        return (F.mse_loss(self.last(torch.tanh(self.first(x)) + self.seen), labels),)


def test_a_write_behind_a_dropout_of_nothing_is_kept() -> None:
    torch.manual_seed(0)
    model, batch = Undropped(), {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    start = {name: t.clone() for name, t in model.state_dict().items()}
    wanted = _gathered(model, model(**batch)[0])
    for stages in (1, 2):
        model.load_state_dict(start)
        model.zero_grad(set_to_none=True)
        layers = layers_for(model, batch, stages)
        assert _worst(wanted, _gathered(model, through(layers, batch)[0])) < 1e-6
    assert torch.equal(wanted["buffer seen"], torch.ones(4))
