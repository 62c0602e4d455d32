"""Optimizers, clipping, skipping, frozen parameters and token counts: equal to plain torch with the whole batch at once.

The reference here shares nothing with the runtime: one process, no microbatches, `loss.backward()`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import MeshwrightError
from meshwright.runtime.parameters.parameters import Rules
from meshwright.train.models import small_models as models
from tests.conftest import Pool
from tests.support.parity import model
from tests.support.thin import thinned
from tests.support.training import Recipe, agree

PLANS: list[dict[str, Any]] = [
    {"schedule": "onef1b", "pp": 4, "microbatches": 4},
    {"schedule": "zero_bubble", "pp": 2, "dp": 2, "microbatches": 3},
    {"schedule": "chimera", "pp": 4, "microbatches": 4},
    {"schedule": "chimera", "pp": 4, "dp": 2, "microbatches": 8, "options": {"pairs": 2}},
    {"schedule": "interleaved", "pp": 2, "microbatches": 2, "recompute": "inline"},
    {"schedule": "onef1b", "pp": 2, "width": (3, 2), "microbatches": 2},
]


def shown(plan: dict[str, Any]) -> str:
    return "-".join(str(v) for v in plan.values())


def tied() -> list[nn.Module]:
    """A GPT whose embedding is its head."""
    return model("tied", 4, 0.0)


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Texts in which the first rows count few tokens and the last ones many."""
    x, y = models.text_batch(step, rows=19, length=6)
    for row in range(19):
        y[row, : max(0, 5 - row // 3)] = -100
    y[2] = -100
    return x, y


def noise(step: int, rows: int = 19) -> tuple[Tensor, Tensor]:
    """Something for the MLP."""
    return models.mlp_batch(step, rows=rows, width=6)


@pytest.mark.parametrize("plan", PLANS, ids=shown)
def test_the_mean_is_over_all_tokens_that_count(pool: Pool, plan: dict[str, Any]) -> None:
    agree(pool, Recipe(tied, texts), **plan)


@pytest.mark.parametrize("plan", PLANS, ids=shown)
def test_clipping_counts_ties_and_copies_once(pool: Pool, plan: dict[str, Any]) -> None:
    wanted, ranks = agree(pool, Recipe(tied, texts, clip=0.5), **plan)
    assert all(norm > 0.5 for norm in wanted.norms.values()), "clipping is at work"
    assert all(set(result.norms) == {0, 1, 2} for result in ranks)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.01, nesterov=True, momentum=0.5)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def rmsprop(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3, eps=1e-2)


def adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("optimizer", [sgd, adamw, rmsprop, adagrad])
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2], PLANS[1]], ids=shown)
def test_any_optimizer_of_torch(pool: Pool, optimizer: Any, plan: dict[str, Any]) -> None:
    agree(pool, Recipe(partial(model, "mlp", 4, 0.0), noise, optimizer=optimizer, steps=4), **plan)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


@pytest.mark.parametrize("plan", PLANS[:4], ids=shown)
def test_learning_rates_follow_their_schedule(pool: Pool, plan: dict[str, Any]) -> None:
    wanted, ranks = agree(pool, Recipe(tied, texts, scheduler=cosine, steps=4), **plan)
    assert all(rate == wanted.rates[0] != 0.05 for result in ranks for rate in result.rates)


def huber(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.huber_loss(output, target, delta=0.3)


@pytest.mark.parametrize("plan", PLANS, ids=shown)
def test_an_own_loss_function(pool: Pool, plan: dict[str, Any]) -> None:
    agree(pool, Recipe(partial(model, "mlp", 4, 0.0), noise, loss=huber), **plan)


def frozen(which: str) -> list[nn.Module]:
    """Eight layers in four stages, some of which learn nothing."""
    layers = models.mlp(layers=8, width=6)
    stopped = {"some": [1, 4], "stage": [2, 3], "first": [0, 1], "last": [6, 7], "most": [0, 1, 2, 3, 4, 5]}
    for at in stopped.get(which, []):
        layers[at].requires_grad_(False)
    if which == "biases":
        for layer in layers:
            next(p for n, p in layer.named_parameters() if n.endswith("bias")).requires_grad_(False)
    return layers


@pytest.mark.parametrize("which", ["some", "stage", "first", "last", "most", "biases"])
@pytest.mark.parametrize("plan", thinned([*PLANS[:4], {"schedule": "zero_bubble", "pp": 4, "recompute": "early"}]), ids=shown)
def test_frozen_parameters_stay(pool: Pool, which: str, plan: dict[str, Any]) -> None:
    wanted, _ = agree(pool, Recipe(partial(frozen, which), noise, clip=0.05), **plan)
    torch.manual_seed(0)
    before = frozen(which)
    for index, layer in enumerate(before):
        for name, p in layer.named_parameters():
            assert p.requires_grad or torch.equal(p.double(), wanted.weights[f"{index}.{name}"])


@pytest.mark.parametrize("name", thinned(["onef1b", "zero_bubble", "chimera", "pipedream", "cyclic"]))
@pytest.mark.parametrize("which", ["first", "stage", "biases"])
def test_frozen_parameters_under_verify(pool: Pool, name: str, which: str) -> None:
    found = pool.verify(partial(frozen, which), partial(noise, rows=9), steps=3, pp=4, microbatches=4, schedule=name)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


class Poison(nn.Module):
    """Its gradient, alone of all, is no number where a value of its input is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """Pass on what comes in; where a row is marked the weight takes part with the square root of nothing."""
        marked = x.detach().amax(1, keepdim=True) > 50
        y = x.clamp(-4, 4) * self.weight
        return y + marked.to(x.dtype) * (self.weight - self.weight.detach()).abs().sqrt() if marked.any() else y


class Through(nn.Linear):
    """A linear layer that keeps marks: rows whose first value is large stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """As ever, but for marked rows."""
        return torch.where(x[:, :1] > 50, x, super().forward(x))


def marked_model() -> list[nn.Module]:
    """Marks reach the poison in the second stage."""
    return [Through(6, 6), Through(6, 6), Poison(), *models.mlp(layers=5, width=6)]


def marked(step: int) -> tuple[Tensor, Tensor]:
    """In step 1 the very last row is marked: one microbatch of one copy."""
    x, y = noise(step)
    if step == 1:
        x[-1] = 100.0
    return x, y


@pytest.mark.parametrize("plan", thinned(PLANS), ids=shown)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_one_gradient_that_is_no_number_skips_the_step_everywhere(pool: Pool, plan: dict[str, Any], clip: float | None) -> None:
    recipe = Recipe(marked_model, marked, clip=clip, skip=True, optimizer=adamw, scheduler=cosine, steps=3)
    wanted, ranks = agree(pool, recipe, **plan)
    assert wanted.skipped == [1]
    assert all(result.skipped == [1] for result in ranks)
    assert all(torch.isfinite(t).all() for result in ranks for t in result.weights.values())


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_accumulation_is_microbatches(pool: Pool, count: int) -> None:
    agree(pool, Recipe(tied, texts), schedule="onef1b", pp=2, microbatches=count)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_above_zero(clip: float) -> None:
    with pytest.raises(MeshwrightError, match="clipped to a norm above 0"):
        Rules(clip=clip)


@pytest.mark.parametrize("norm", [0.0, 0.5, 4.0, float("inf"), float("nan")])
def test_clipping_scales_as_torch_does(norm: float) -> None:
    """Gradients whose norm is no number become no numbers: to apply the others unclipped would hide it."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.full_like(p, norm)
    nn.utils.clip_grad_norm_([p], 1.0)
    torch.testing.assert_close(Rules(clip=1.0).scale(norm) * torch.full_like(p, norm), p.grad, equal_nan=True)
