"""Each kind of split module is torch's own to the bit, whether its weight gradient comes in B, or later in W."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from meshwright.runtime.stage.split_backward import Deferred, run
from tests.support.splitting import Block, Conv1D, backward, check, grads

DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Fixed numbers, on one thread: sums on several need not repeat."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@st.composite
def inputs(draw: st.DrawFn, features: int) -> Tensor:
    """An input of 1 to 4 dimensions in one of several layouts."""
    sizes = [draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 7)) for _ in range(draw(st.integers(0, 3)))]
    x = torch.randn(*sizes, features, dtype=draw(st.sampled_from(DTYPES)))
    match draw(st.sampled_from(["plain", "permuted", "sliced", "expanded"])):
        case "permuted":
            order = draw(st.permutations(range(x.dim())))
            back = [order.index(i) for i in range(x.dim())]
            return x.permute(*order).contiguous().permute(*back)
        case "sliced":
            return torch.stack([x, -x], -1)[..., 0]
        case "expanded" if sizes:
            return x[:1].expand(x.shape)
    return x


@settings(max_examples=300, deadline=None)
@given(data=st.data(), fan_in=st.integers(1, 9), fan_out=st.integers(1, 9), bias=st.booleans())
def test_linear(data: st.DataObject, fan_in: int, fan_out: int, bias: bool) -> None:
    x = data.draw(inputs(fan_in))
    check(nn.Linear(fan_in, fan_out, bias=bias, dtype=x.dtype), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 48), (5, 33, 48), (2, 5, 33, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_of_real_sizes(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(48, 100, bias=bias, dtype=dtype)
    check(linear, torch.randn(shape, dtype=dtype))
    check(linear, torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))))
    check(linear, torch.randn(*shape[:-1], 96, dtype=dtype)[..., ::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48,), (33, 48), (5, 33, 48), (2, 5, 33, 48)])
def test_conv1d_of_transformers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(Conv1D(100, 48).to(dtype), torch.randn(shape, dtype=dtype))
    if len(shape) == 2:
        check(Conv1D(100, 48).to(dtype), torch.randn(48, 33, dtype=dtype).t())


@pytest.mark.parametrize("transposed", [nn.Linear(6, 4), Conv1D(4, 6)])
def test_a_weight_stored_by_columns(transposed: nn.Module) -> None:
    transposed.weight = nn.Parameter(transposed.weight.detach().t().contiguous().t())  # type: ignore[arg-type,operator]
    check(transposed, torch.randn(5, 7, 6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [None, 0, -2])
@pytest.mark.parametrize("shape", [(), (9,), (4, 9), (2, 4, 9)])
def test_embedding(dtype: torch.dtype, padding: int | None, shape: tuple[int, ...]) -> None:
    check(nn.Embedding(5, 8, padding_idx=padding, dtype=dtype), torch.randint(0, 5, shape))


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", CONVOLUTIONS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
def test_convolutions(dtype: torch.dtype, dims: int, groups: int, bias: bool, stride: int, padding: int, dilation: int) -> None:
    layer = CONVOLUTIONS[dims](4, 8, 3, stride, padding, dilation, groups, bias, dtype=dtype)
    check(layer, torch.randn(3, 4, *[7] * dims, dtype=dtype))
    check(layer, torch.randn(3, *[7] * dims, 4, dtype=dtype).movedim(-1, 1))


class Louder(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice the product."""
        return 2 * super().forward(input)


class Kept(nn.Linear):
    """A subclass that keeps its forward."""


INDEX = torch.tensor([[1, 2, 2], [0, 4, 1]])


LEFT: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "subclass": (lambda: Louder(4, 4), torch.ones(3, 4)),
    "max_norm": (lambda: nn.Embedding(5, 4, max_norm=1.0), INDEX),
    "by_freq": (lambda: nn.Embedding(5, 4, scale_grad_by_freq=True), INDEX),
    "same": (lambda: nn.Conv1d(4, 4, 3, padding="same"), torch.ones(2, 4, 6)),
    "circular": (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), torch.ones(2, 4, 6)),
    "no batch": (lambda: nn.Conv1d(4, 4, 3), torch.ones(4, 6)),
    "norm": (lambda: nn.LayerNorm(4), torch.randn(3, 4)),
    "frozen": (lambda: nn.Linear(4, 4).requires_grad_(False), torch.ones(3, 4)),
    "complex": (lambda: nn.Linear(4, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_autograd(name: str) -> None:
    make, x = LEFT[name]
    check(make(), x, split=False)


def test_left_to_autograd_where_copies_are_not_for_comparison() -> None:
    sparse = nn.Embedding(5, 4, sparse=True)
    assert not backward(sparse, INDEX, Deferred(sparse))[2]
    assert sparse.weight.grad is not None and sparse.weight.grad.is_sparse
    computed = parametrizations.weight_norm(nn.Linear(4, 4))
    assert not backward(computed, torch.ones(3, 4), Deferred(computed))[2]
    assert all(g is not None for g in grads(computed))


def test_a_subclass_that_keeps_its_forward() -> None:
    check(Kept(4, 3), torch.randn(2, 5, 4))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_frozen_parameters_get_nothing(name: str) -> None:
    for layer, x in ((nn.Linear(4, 3), torch.randn(2, 5, 4)), (nn.Conv1d(4, 3, 2), torch.randn(2, 4, 5))):
        layer.get_parameter(name).requires_grad_(False)
        check(layer, x, split=name == "bias")
        run(backward(layer, x, Deferred(layer))[2])
        assert [n for n, p in layer.named_parameters() if p.grad is None] == [name]


def test_one_frozen_bias_of_a_shared_weight() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    two.bias.requires_grad_(False)
    check(nn.Sequential(one, nn.Tanh(), two), torch.randn(3, 4))


def test_a_weight_used_often_and_parameters_tied() -> None:
    check(Block(), torch.randn(4, 5, 6))
    tied = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False))
    tied[2].weight = tied[0].weight
    check(tied, torch.randint(0, 7, (3, 4)))


def test_second_derivatives_of_a_whole_backward() -> None:
    for layer, x in ((nn.Linear(3, 2), torch.randn(2, 4, 3)), (nn.Conv1d(3, 2, 2), torch.randn(2, 3, 4))):
        layer.double()
        Deferred(layer)
        args = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]  # type: ignore[union-attr]

        def call(x: Tensor, w: Tensor, b: Tensor, layer: nn.Module = layer) -> Tensor:
            y: Tensor = functional_call(layer, {"weight": w, "bias": b}, (x,))
            return y

        assert torch.autograd.gradgradcheck(call, args)
