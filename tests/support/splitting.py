"""Layers whose backward is split, and one comparison: plain, whole and deferred give equal bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.runtime.stage.split_backward import Deferred, Rest, run


class Conv1D(nn.Module):
    """The layer of transformers' GPT-2, as it is written there."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Block(nn.Module):
    """Residual, norm, a weight used twice, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.mix = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(6, 6, bias=False)
        self.down, self.scale, self.calls = Conv1D(6, 12), nn.Parameter(torch.rand(6)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.mix(self.mix(self.mix(x)))
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def grads(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def backward(module: nn.Module, x: Tensor, deferred: Deferred | None = None) -> tuple[Tensor, Tensor | None, Rest]:
    """One forward and B, or I if `deferred`; the output gradient is the same for equal shapes and not contiguous."""
    x = x.detach()
    x.requires_grad_(x.is_floating_point())
    y = module(x)
    if deferred:
        deferred.begin()
    generator = torch.Generator().manual_seed(7)
    g = torch.randn(*reversed(y.shape), generator=generator, dtype=y.dtype).permute(*reversed(range(y.dim())))
    y.backward(g)
    return y.detach(), x.grad, deferred.end() if deferred else []


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return all(p is q if p is None or q is None else torch.equal(p, q) for p, q in zip(a, b, strict=True))


def layout(g: Tensor | None) -> list[int] | None:
    return None if g is None else [stride for stride, size in zip(g.stride(), g.shape, strict=True) if size > 1]


def check(module: nn.Module, x: Tensor, split: bool = True) -> None:
    """Plain, whole and deferred give equal bits, and equal layouts; `split`: something was in fact deferred."""
    module, whole, late = (copy.deepcopy(module) for _ in range(3))
    Deferred(whole)
    deferred = Deferred(late)
    for _ in range(2):  # the second time .grad exists
        y, gx, _ = backward(module, x)
        y_whole, gx_whole, _ = backward(whole, x)
        before = grads(late)
        y_late, gx_late, rest = backward(late, x, deferred)
        assert bool(rest) == split
        run(rest)
        assert same([y, gx, *grads(module)], [y_whole, gx_whole, *grads(whole)])
        assert same([y, gx, *grads(module)], [y_late, gx_late, *grads(late)])
        assert [layout(g) for g in grads(late)] == [layout(g) for g in grads(module)]
        for old, new in zip(before, grads(late), strict=True):
            assert old is None or old is new
