"""The local product as a node of autograd that can leave its weight gradient to later.

Backward first gives the gradient of x, so that its collective can start. If the slot has a rest, the weight gradient is put
there as a job over (x, gradient of y); otherwise it is computed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

Job = tuple[Callable[[], Tensor], Tensor]
"""A weight gradient that is owed, and the weight that it belongs to."""


@dataclass
class JobSlot:
    """Where backward looks for the list that takes its weight gradients."""

    rest: list[Job] | None = None
    spend: Callable[[int], None] | None = None
    """On an emulated device: called with the multiply-adds of every product."""


def _spend(slot: JobSlot, count: int) -> None:
    if slot.spend is not None and count:
        slot.spend(count)


class _Product(Function):
    """x @ W^T for W as (out, in), or x @ W for one stored as (in, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, slot: JobSlot) -> Tensor:
        """The product."""
        ctx.save_for_backward(x, weight)
        ctx.call = weight, transposed, slot
        _spend(slot, x.numel() * weight.shape[1 if transposed else 0])
        return torch.matmul(x, weight if transposed else weight.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """The gradient of x now, that of the weight now or later."""
        x, saved = ctx.saved_tensors
        weight, transposed, slot = ctx.call
        gx = torch.matmul(g, saved.t() if transposed else saved) if ctx.needs_input_grad[0] else None
        _spend(slot, g.numel() * x.shape[-1] if gx is not None else 0)
        if not ctx.needs_input_grad[1]:
            return gx, None, None, None
        rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])

        def job() -> Tensor:
            _spend(slot, grads.numel() * rows.shape[-1])
            return torch.mm(rows.t(), grads) if transposed else torch.mm(grads.t(), rows)

        if slot.rest is None:
            return gx, job(), None, None
        slot.rest.append((job, weight))
        return gx, None, None, None


_product: Callable[[Tensor, Tensor, bool, JobSlot], Tensor] = _Product.apply


class SplitProduct(nn.Module):
    """A product whose weight gradient can wait."""

    def __init__(self, slot: JobSlot) -> None:
        super().__init__()
        self.slot = slot

    def forward(self, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        """The product."""
        return _product(x, weight, transposed, self.slot)


@torch.no_grad()
def add_to_grad(weight: Tensor, gradient: Tensor) -> None:
    """Add to what a tensor has as its gradient."""
    if weight.grad is None:
        weight.grad = gradient.clone()
    else:
        weight.grad.add_(gradient)
