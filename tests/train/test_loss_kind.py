"""Losses that are no mean: found at the start, and exact where they are declared as sums."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.capture.trace.export import flatten
from meshwright.runtime.stage.batch import Own
from meshwright.train.setup.check_capture import Start, check_start
from tests.conftest import Pool
from tests.support import hard_models as hard

WEIGHTS = (1.0, 2.0, 5.0, 1.0, 3.0)


class Loss(hard.Base):
    """A model whose loss is another function of scores and labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.loss_name = kind
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(hard.WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """Its loss alone."""
        hidden = self.body(x)
        if self.loss_name == "batch norm":
            hidden = self.norm(hidden)
        scores = self.head(hidden)
        wanted = functional.one_hot(labels, hard.CLASSES).float()
        match self.loss_name:
            case "sum":
                found = functional.cross_entropy(scores, labels, reduction="sum")
            case "rmse":
                found = functional.mse_loss(scores, wanted).sqrt()
            case "perplexity":
                found = functional.cross_entropy(scores, labels).exp()
            case "masked":
                counts = (labels > 0).float()
                found = (functional.cross_entropy(scores, labels, reduction="none") * counts).sum() / counts.sum().clamp(min=1)
            case "class weights":
                found = functional.cross_entropy(scores, labels, weight=torch.tensor(WEIGHTS))
            case "squares":
                found = functional.mse_loss(scores, wanted)
            case _:
                found = functional.cross_entropy(scores, labels)
        return (found,)


def told(model: nn.Module, caplog: pytest.LogCaptureFixture, **more: Any) -> str:
    batch = hard.features(8)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        check_start(Start(model, flatten(model, batch), batch, microbatches=2, **more))
    return caplog.text


@pytest.mark.parametrize("kind", ["rmse", "perplexity", "masked", "batch norm"])
def test_a_loss_that_is_neither_mean_nor_sum_is_warned_about(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    text = told(Loss(kind), caplog)
    assert "the loss of a batch of 7 rows is" in text and "compute_loss_func" in text
    assert ("norm normalizes over the rows" in text) == (kind == "batch norm")


class Places(nn.Module):
    """A loss over the places that a mask lets through: their mean, or counted by labels."""

    def __init__(self, own_mean: bool) -> None:
        super().__init__()
        self.own_mean = own_mean
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor]:
        scores = (self.body(x) * mask[..., None]).flatten(0, 1)
        if not self.own_mean:
            return (functional.cross_entropy(scores, labels.flatten()),)
        losses = functional.cross_entropy(scores, labels.flatten(), reduction="none") * mask.flatten()
        return (losses.sum() / mask.sum(),)


@pytest.mark.parametrize("own_mean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_masked_mean_is_found_before_anything_is_masked(
    own_mean: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Places(own_mean)
    batch = {"x": torch.randn(8, 6, 4), "mask": torch.ones(8, 6, dtype=dtype), "labels": torch.randint(0, 3, (8, 6))}
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        check_start(Start(model, flatten(model, batch), batch, microbatches=2))
    assert ("rows that 'mask' cuts to different lengths is" in caplog.text) == own_mean
    assert own_mean or not caplog.text


class Counted(hard.Words):
    """A mean over labels that are not -100, counted by the forward itself or by torch."""

    def __init__(self, own_mean: bool) -> None:
        super().__init__()
        self.own_mean = own_mean

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        scores = self.head(self.body(self.embed(input_ids))).flatten(0, 1)
        losses = functional.cross_entropy(scores, labels.flatten(), reduction="none" if self.own_mean else "mean")
        return (losses.sum() / (labels != -100).sum() if self.own_mean else losses,)


@pytest.mark.parametrize("own_mean", [True, False])
def test_a_mean_over_labels_is_found_before_any_is_ignored(own_mean: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, ids = Counted(own_mean), torch.randint(0, hard.WORDS, (8, 6))
    batch = {"input_ids": ids, "labels": ids.roll(1, 1)}
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        check_start(Start(model, flatten(model, batch), batch, microbatches=2))
    assert ("rows that 'labels' cuts to different lengths is" in caplog.text) == own_mean
    assert own_mean or not caplog.text


def test_a_sum_is_found_and_what_to_do_is_said(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    assert "loss_kind='sum' in TrainingArguments, parallelize or verify is exact" in told(Loss("sum"), caplog)


@pytest.mark.parametrize("kind", ["mean", "squares", "class weights"])
def test_means_are_quiet(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    assert told(Loss(kind), caplog) == ""


class Autoencoder(nn.Module):
    """Draws in training and in evaluation, as many write it."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        drawn = mean + torch.randn_like(spread) * (spread / 2).exp()
        return (functional.mse_loss(self.decoder(drawn), x, reduction=self.reduction),)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_sum_is_found_where_evaluation_draws(reduction: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Autoencoder(reduction), {"x": torch.randn(8, 6)}
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        check_start(Start(model, flatten(model, batch), batch, microbatches=4))
    assert ("loss_kind='sum'" in caplog.text) == (reduction == "sum"), caplog.text


def test_one_microbatch_is_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Loss("rmse"), hard.features(8)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        check_start(Start(model, flatten(model, batch), batch, microbatches=1))
    assert caplog.text == ""


def plain(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[tuple[float, float]]:
    """Loss and norm of each step of the model itself."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)[0]
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        found.append((float(loss.detach()), float(norm)))
    return found


def test_a_declared_sum_is_exact_for_uneven_rows() -> None:
    torch.manual_seed(0)
    model = Loss("sum")
    batches = [hard.features(rows, step=rows) for rows in (8, 6, 3, 1, 7)]
    wanted = plain(copy.deepcopy(model), batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with mw.parallelize(model, batches[0], {"pp": 1, "microbatches": 4}, optimizer=optimizer, loss_kind="sum") as session:
        found = [session.step(batch) for batch in batches]
        evaluated = session.evaluate(batches[0]).loss
    assert [f.loss for f in found] == pytest.approx([w[0] for w in wanted], rel=1e-6)
    assert [f.grad_norm for f in found] == pytest.approx([w[1] for w in wanted], rel=1e-6)
    assert evaluated == pytest.approx(float(model(**batches[0])[0].detach()), rel=1e-6)


@pytest.mark.parametrize("plan", [{"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2, "schedule": "chimera"}], ids=str)
def test_verify_holds_a_declared_sum(plan: dict[str, Any], pool: Pool) -> None:
    found = pool.verify(
        partial(Loss, "sum"), summed_batch, microbatches=2, steps=2, loss_kind="sum", dtype="float32", optimizer=slow, **plan
    )
    assert found.passed
    torch.manual_seed(0)
    wanted = plain_slow(Loss("sum"))
    assert list(found.losses) == pytest.approx(wanted, rel=1e-5)


def summed_batch(step: int) -> dict[str, Tensor]:
    return hard.features(9 + 4 * step, step=step)


def slow(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def plain_slow(model: nn.Module) -> list[float]:
    return [loss for loss, _ in plain(model, [summed_batch(step) for step in range(2)])]


def copies(rows: tuple[int, int]) -> list[tuple[float, float]]:
    """Two copies that have loaded rows of their own, the last one perhaps none."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = Loss("sum")
    every = hard.features(sum(rows), step=3)
    first = 0 if dist.get_rank() == 0 else rows[0]
    mine = {name: t[first : first + rows[dist.get_rank()]] for name, t in every.items()}
    session = mw.parallelize(
        model, every, {"dp": 2, "microbatches": 2}, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), loss_kind="sum"
    )
    found = []
    for _ in range(2):
        result = session.step(Own(mine))
        found.append((result.loss, result.grad_norm))
    evaluated = session.evaluate(Own(mine)).loss
    session.close()
    return [*found, (evaluated, 0.0)]


@pytest.mark.parametrize("rows", [(4, 4), (5, 2), (6, 0), (1, 3)])
def test_a_declared_sum_is_exact_when_the_last_copy_is_empty(rows: tuple[int, int], pool: Pool) -> None:
    torch.manual_seed(0)
    model = Loss("sum")
    every = hard.features(sum(rows), step=3)
    wanted = plain(model, [every, every])
    for found in pool.run(copies, rows, ranks=2):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5) and found[1] == pytest.approx(wanted[1], rel=1e-5)
        assert found[2][0] == pytest.approx(float(model(**every)[0].detach()), rel=1e-5)


def test_an_unknown_kind_and_a_loss_that_is_a_mean_are_refused(tmp_path: Any) -> None:
    with pytest.raises(MeshwrightError, match="a loss must be a mean or a sum, got loss_kind='total'"):
        mw.TrainingArguments(str(tmp_path), loss_kind="total")
    layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    batch = tuple(hard.features(4).values())
    with (
        mw.parallelize(layers, batch, {"pp": 1, "microbatches": 2}, loss_kind="sum") as session,
        pytest.raises(MeshwrightError, match="needs a loss"),
    ):
        session.step(batch)


class Buffered(hard.Base):
    """Weights of classes in a buffer, as they are or worked out from it."""

    def __init__(self, *, changed: bool) -> None:
        super().__init__()
        self.changed = changed
        self.register_buffer("classes", torch.tensor(WEIGHTS))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """A weighted mean."""
        weights = self.classes.sqrt() if self.changed else self.classes
        return (functional.cross_entropy(self.head(self.body(x)), labels, weight=weights),)


@pytest.mark.parametrize("changed", [False, True])
def test_weights_of_classes_in_a_buffer_are_counted(changed: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert told(Buffered(changed=changed), caplog) == ""
