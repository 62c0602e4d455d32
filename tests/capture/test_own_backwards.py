"""Backwards that are not those of torch's operations: kept as they are, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright import MeshwrightError, verify
from meshwright.capture.trace.export import flatten
from meshwright.train.setup.captured_layers import is_captured, through
from meshwright.train.setup.check_capture import Start, check_start
from tests.support import hard_models as hard
from tests.support.layers_of_models import layers_for


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Reversed(torch.autograd.Function):
    """The identity, with the gradient turned round."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class Two(torch.autograd.Function):
    """Two results of two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * (first * w + second), 3 * (first * x + second).sum(0)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class WithObject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, what: object) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


straight = Straight.apply
"""A function's `apply` may be kept under another name."""


class Small(nn.Module):
    """Four layers, with something done between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.between = between

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = self.between(self, torch.tanh(layer(x)))
        return (F.mse_loss(x, labels),)


def _nested(model: nn.Module, x: Tensor) -> Tensor:
    return Reversed.apply(Straight.apply(x, 0.25), 0.5)


def _two(model: nn.Module, x: Tensor) -> Tensor:
    first, second = Two.apply(x, model.scale)
    return first + second


def _unwrapped(model: Any, x: Tensor) -> Tensor:
    return checkpoint(torch.sin, x, use_reentrant=True)


KEPT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "straight-through": lambda model, x: Straight.apply(x, 0.25),
    "kept apply": lambda model, x: straight(x, 0.25),
    "reversal": lambda model, x: Reversed.apply(x, 0.5),
    "nested": _nested,
    "two outputs": _two,
    "reentrant checkpoint": _unwrapped,
}


def _hooked(model: nn.Module, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def _penalised(model: nn.Module, x: Tensor) -> Tensor:
    return x + torch.autograd.grad(x.sum(), x, create_graph=True)[0]


def _local(model: nn.Module, x: Tensor) -> Tensor:
    class Local(Straight):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

    return Local.apply(x)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "tensor hook": (_hooked, r"a gradient hook \(register_hook\).* at .*test_own_backwards.py:\d+"),
    "inner backward": (_penalised, r"a backward \(grad\).* at .*test_own_backwards.py:\d+"),
    "mark_dirty": (lambda model, x: Dirty.apply(x + 0), "Dirty writes into its arguments"),
    "silent write": (lambda model, x: Writes.apply(x + 0), "Writes writes into its arguments"),
    "object": (lambda model, x: WithObject.apply(x, object()), "WithObject takes object"),
}


def batch(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8), "labels": torch.randn(rows, 8)}


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("stages", [1, 2])
def test_own_backwards_are_kept(name: str, stages: int) -> None:
    torch.manual_seed(0)
    model, given = Small(KEPT[name]), batch()
    layers = layers_for(model, given, stages)
    wanted, found = model(**given)[0], through(layers, given)[0]
    assert torch.equal(wanted, found)
    theirs, ours = _gradients(model, wanted), _gradients(model, found)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[n], ours[n]) for n in theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(name: str) -> None:
    between, why = REFUSED[name]
    with pytest.raises(MeshwrightError, match=why):
        flatten(Small(between), batch())
    assert torch.Tensor.register_hook.__name__ == "register_hook", "all is as it was"


def test_backward_hooks_of_modules_are_refused() -> None:
    model = Small(KEPT["straight-through"])
    model.layers[1].register_full_backward_hook(lambda module, given, got: None)
    with pytest.raises(MeshwrightError, match=r"layers\.1 has a backward hook"):
        flatten(model, batch())


class Twice(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_a_sequential_with_its_own_forward_is_captured() -> None:
    torch.manual_seed(0)
    model, x = Twice(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    assert is_captured(model) and not is_captured(nn.Sequential(nn.Linear(8, 8)))
    assert torch.equal(through(layers_for(model, (x,), 1), {"input": x, "x": x})[0], model(x))


def _straight_model() -> nn.Module:
    torch.manual_seed(0)
    return Small(_nested)


def _rows(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return batch()


def test_own_backwards_on_workers() -> None:
    certificate = verify(_straight_model, _rows, parallel={"pp": 2, "schedule": "zbv", "microbatches": 2}, steps=1)
    assert certificate.passed


class _Adds(torch.autograd.Function):
    """Passes a value on, and gives a second one the gradient 1 whatever the loss is multiplied by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=gradients[0].dtype)


class _Auxiliary(hard.Base):
    """An auxiliary loss that no number shows, as some mixtures of experts have it."""

    def body(self, x: Tensor) -> Tensor:
        found = super().body(x)
        called: Tensor = _Adds.apply(found, found.square().mean())  # type: ignore[no-untyped-call]
        return called


def test_a_backward_that_does_not_grow_with_the_loss_is_refused() -> None:
    torch.manual_seed(0)
    batch = hard.features(8)
    clipped = hard.Base()
    clipped.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for model in (_Auxiliary(), clipped):
        with pytest.raises(MeshwrightError, match=r"(?s)backward is not linear.*the gradient of.*max_grad_norm"):
            check_start(Start(model, flatten(model, batch), batch))
    halved = hard.Base()
    halved.head.weight.register_hook(lambda gradient: gradient / 2)
    check_start(Start(halved, flatten(halved, batch), batch))
