"""Optimizers that look at other parameters than the one they update are refused where parameters have several optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.train.models import small_models as models
from meshwright.train.optimizer.coupled_parameters import refuse_coupled, refuse_not_elementwise
from tests.support.trainers import gpt2, ours, text


class NormedSGD(torch.optim.Optimizer):
    """A step divided by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Down the gradient, by as much as lr in all."""
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in every]))
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / norm * group["lr"])


class Measured(torch.optim.Optimizer):
    """The way of Prodigy: a step size for all, from distances and gradients of all, that acts from the second step on."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Estimate after stepping."""
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                start = self.state[p].setdefault("start", p.clone())
                total += float((p.grad * (start - p)).sum())
                p.sub_(p.grad.sign() * group["d"] * group["lr"])
        for group in self.param_groups:
            group["d"] = max(group["d"], abs(total) * 1e-3)


def units() -> list[list[nn.Parameter]]:
    return [[nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))] for _ in range(2)]


def tried(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    refuse_coupled(lambda pair, _: make(pair), units())


@pytest.mark.parametrize("kind", [NormedSGD, Measured])
def test_optimizers_that_couple_are_found_by_trying_them(kind: Any) -> None:
    with pytest.raises(MeshwrightError, match=f"{kind.__name__} couples parameters: .* 2 units .*differ from step"):
        tried(kind)
    refuse_coupled(lambda pair, _: kind(pair), units()[:1])  # one unit has one optimizer for all


SEPARATE: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
    lambda p: torch.optim.AdamW(p, amsgrad=True),
    lambda p: torch.optim.AdamW(p, foreach=True),
    lambda p: torch.optim.AdamW(p, fused=True),
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.ASGD, lambda p: torch.optim.Muon(p), Adafactor,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SEPARATE)))
def test_others_are_not(number: int, caplog: pytest.LogCaptureFixture) -> None:
    tried(SEPARATE[number])
    assert "could not test whether" not in caplog.text


class ByGroup(torch.optim.Optimizer):
    """Other steps for a group with an option, as Muon beside Adam: by the norm of a matrix, or by the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "kind": "plain"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """By the option `kind`."""
        every = [p.grad for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for p in group["params"]:
                match group["kind"]:
                    case "matrix":
                        step = p.grad / p.grad.norm()
                    case "all":
                        step = p.grad / sum(g.norm() for g in every)
                    case "dims":
                        step = p.grad if p.ndim > 1 else p.grad.sign()
                    case _:
                        step = p.grad
                p.sub_(step * group["lr"])


@pytest.mark.parametrize("kind", ["matrix", "dims"])
def test_every_group_is_tried_on_parts(kind: str) -> None:
    """The first matrix is in a group with plain steps. Parts have one dimension if ranks divide parameters."""
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    group = {params[0]: "plain", params[1]: kind}.__getitem__

    def make(parts: list[nn.Parameter], like: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ByGroup([{"params": [p], "kind": group(of)} for p, of in zip(parts, like, strict=True)])

    refuse_not_elementwise(make, params[:1], "it is cut", group=group, flat=True)
    with pytest.raises(MeshwrightError, match=r"ByGroup is not elementwise: .* it is cut"):
        refuse_not_elementwise(make, params, "it is cut", group=group, flat=True)


def test_every_group_is_tried_for_coupling() -> None:
    units = [[nn.Parameter(torch.randn(4)) for _ in range(2)] for _ in range(2)]
    group = {p: kind for unit in units for p, kind in zip(unit, ("plain", "all"), strict=True)}.__getitem__

    def make(pair: list[nn.Parameter], like: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ByGroup([{"params": [p], "kind": group(of)} for p, of in zip(pair, like, strict=True)])

    with pytest.raises(MeshwrightError, match="ByGroup couples parameters"):
        refuse_coupled(make, units, group)


@pytest.mark.parametrize("kind", [NormedSGD, torch.optim.Muon, torch.optim.Adafactor])
def test_parts_have_an_optimizer_each(kind: Any) -> None:
    """The norm of all gradients that a rank has is not that of all gradients."""
    with pytest.raises(MeshwrightError, match=f"{kind.__name__} is not elementwise"):
        refuse_not_elementwise(lambda parts, _: kind(parts), [nn.Parameter(torch.randn(4, 4))], "it is cut", flat=True)


@pytest.mark.parametrize("number", range(len(SEPARATE) - 2))
@pytest.mark.parametrize("flat", [True, False])
def test_elementwise_optimizers_take_parts(number: int, flat: bool, caplog: pytest.LogCaptureFixture) -> None:
    refuse_not_elementwise(lambda parts, _: SEPARATE[number](parts), [nn.Parameter(torch.randn(4, 4))], "it is cut", flat=flat)
    assert "could not test whether" not in caplog.text


def test_a_closure_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="LBFGS needs a closure"):
        tried(torch.optim.LBFGS)


def test_a_trainer_refuses_under_stages_and_trains_without(tmp_path: Path, workers: Any) -> None:
    model = gpt2()
    pair = (NormedSGD(model.parameters()), None)
    with pytest.raises(MeshwrightError, match="NormedSGD couples parameters"):
        ours(model, tmp_path, text(), workers, parallel={"pp": 2}, optimizers=pair, max_steps=1).train()
    assert ours(model, tmp_path, text(), optimizers=pair, max_steps=1).train().global_step == 1


def test_one_unit_that_ranks_divide_has_several_optimizers() -> None:
    with (
        pytest.raises(MeshwrightError, match=r"Measured couples parameters: .* ranks that hold parts of parameters"),
        mw.parallelize(nn.Sequential(*stack()).double(), noise(0), {"dp": 1, "dp_mode": "zero-1"}, optimizer=Measured),
    ):
        pass
    with mw.parallelize(nn.Sequential(*stack()).double(), noise(0), {"dp": 1}, optimizer=Measured) as session:
        session.step(noise(0))


def stack() -> list[nn.Module]:
    return models.mlp(layers=4, width=6)


def noise(step: int) -> tuple[Tensor, Tensor]:
    return models.mlp_batch(step, rows=4, width=6)


def test_verify_refuses() -> None:
    with pytest.raises(MeshwrightError, match="Measured couples parameters"):
        mw.verify(stack, noise, {"pp": 2}, optimizer=Measured)


@pytest.mark.parametrize(("output", "target"), [((4, 1), (4,)), ((4,), (4, 1)), ((4, 6), (4, 1))])
def test_the_default_loss_compares_like_with_like(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    """torch would broadcast these, and pair all rows of a microbatch with all others."""
    width = output[1] if len(output) > 1 else 1
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, width), *([nn.Flatten(0)] if len(output) == 1 else [])]
    words, batch = r"the model's output is \(4.* and its target \(4", (torch.randn(4, 6), torch.randn(target))
    with mw.parallelize(layers, batch, {"pp": 1}) as session, pytest.raises(MeshwrightError, match=words):
        session.step(batch)


def test_labels_are_one_for_each_position() -> None:
    words = r"the model's output is \(4, 5\) and its labels \(4, 2\)"
    example = (torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
    with mw.parallelize([nn.Linear(6, 5)], example, {"pp": 1}) as session, pytest.raises(MeshwrightError, match=words):
        session.step((torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.int64)))
