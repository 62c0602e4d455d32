"""Operations without a rule of their own: on whole values, replicated, or refused by name; writes into parts of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.errors import MeshwrightError
from tests.support.sharded import (
    Reference,
    Request,
    box,
    declared_words,
    grid,
    line,
    on_threads,
    parity,
    plain_pass,
    reference,
    settled,
)

BOUND = 1e-12


class Odd(nn.Module):
    """Has an operation without a rule, and branches."""

    def __init__(self, strange: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.wide, self.gate, self.back = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.strange = strange
        self.head = nn.Linear(16, 48)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.back(functional.silu(self.gate(x)) * self.wide(x))
        x = x + self.strange(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Angles(nn.Module):
    """Complex numbers from features, and a weight that is no operand of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft(x) * 0.3).sum(-1) * self.scale


class Distances(nn.Module):
    """Distances to points, which are parameters: an operation with a parameter and without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.points)


class Masks(torch.autograd.Function):
    """Mixes its input with a constant that it makes on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        negative = x < 0
        ctx.save_for_backward(negative)
        return x.masked_fill(negative, torch.tensor(0.25, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        [negative] = ctx.saved_tensors
        return gradient.masked_fill(negative, 0)


class Masking(nn.Module):
    """A user's function."""

    def forward(self, x: Tensor) -> Tensor:
        return Masks.apply(x)


def odd(strange: Callable[[], nn.Module] = Distances) -> Reference:
    torch.manual_seed(0)
    tokens = torch.randint(0, 48, (8, 6), generator=torch.Generator().manual_seed(0))
    return reference(Odd(strange()), {"tokens": tokens, "labels": tokens.roll(-1, 1)})


def test_an_operation_with_a_parameter_and_without_a_rule_is_refused_by_name_and_module() -> None:
    with pytest.raises(MeshwrightError, match=r"aten\.cdist.* in strange") as caught:
        settled(odd(), box(2, 1, 2))
    assert caught.value.fix is not None and "replicate=['strange']" in caught.value.fix


@pytest.mark.parametrize("asked", [box(2, 1, 2), grid(2), line(2, sequence=True)], ids=str)
def test_an_operation_without_parameters_and_rule_runs_on_whole_values(asked: Request) -> None:
    """What is cut is gathered for it, and the report says so."""
    ref = odd(Angles)
    found = settled(ref, asked)
    outcome = on_threads(ref, found, plain_pass(ref, found))
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome
    assert outcome.words == declared_words(found)
    assert any(move.path == "strange" and "fft" in move.operation and "gather" in move.reason for move in found.extra)


class Planes(nn.Module):
    """A norm over two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.LayerNorm((4, 4))
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x).unflatten(-1, (4, 4))).flatten(-2)


@pytest.mark.parametrize("asked", [box(2, 1, 2), line(2)], ids=str)
def test_a_norm_over_several_dimensions(asked: Request) -> None:
    outcome = parity(odd(Planes), asked)
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome
    assert outcome.words == declared_words(outcome.settled)
    assert set(outcome.settled.replicated) == {"strange.norm.weight", "strange.norm.bias"}


class Bits(nn.Module):
    """Keeps numbers above a half, which it knows by their bits."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.view(torch.int64) > 1022 << 52)


def test_a_view_of_bits_is_no_change_of_shape() -> None:
    outcome = parity(odd(Bits), box(2, 1, 2))
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome


@pytest.mark.parametrize("asked", [box(2, 1, 2), line(2, sequence=True)], ids=str)
def test_a_user_s_function_with_constants_of_its_own(asked: Request) -> None:
    """Its sizes are worked out as on a CPU: on tensors of another device it would fail."""
    outcome = parity(odd(Masking), asked)
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome
    assert outcome.words == declared_words(outcome.settled)


@pytest.mark.parametrize("asked", [box(2, 1, 2), grid(2), line(2, sequence=True)], ids=str)
def test_replicated_modules_run_whole(asked: Request) -> None:
    ref = odd()
    found = settled(ref, asked, replicate=["strange"])
    outcome = on_threads(ref, found, plain_pass(ref, found))
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome
    assert outcome.words == declared_words(found)
    assert set(found.replicated) == {"strange.points"}


class Written(nn.Module):
    """Writes into parts of a tensor; `late` reads a view of it that was taken before."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.first, self.scale, self.late = nn.Linear(16, 16), nn.Parameter(torch.linspace(0.5, 1.5, 4)), late

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).clone()
        before = y[..., 8:]
        y[..., 2:6] = x[..., 6:10] * self.scale
        y[:, 0] += 1
        y.transpose(1, 2)[:, 3] *= 2
        return y + before.sum(-1, keepdim=True) if self.late else y.tanh()


@pytest.mark.parametrize("asked", [box(2, 1, 2), grid(2), line(2), line(2, sequence=True)], ids=str)
def test_writes_into_parts_of_a_tensor(asked: Request) -> None:
    outcome = parity(odd(Written), asked)
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome


def test_a_view_that_is_read_after_a_write_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"aten\.copy_.* in strange: it works in place on a value that is read again"):
        settled(odd(partial(Written, late=True)), grid(2))


def test_a_replicated_module_must_exist() -> None:
    with pytest.raises(MeshwrightError, match=r"replicate names 'strong'.*; did you mean strange\?"):
        settled(odd(), line(2), replicate=["strong"])
