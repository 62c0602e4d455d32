"""The local product as an autograd function that can defer its weight gradient.

Backward computes the gradient of x first, so that its collective can start. If the slot has a list (`rest`), the weight gradient
is added to it as a job over (x, gradient of y). Otherwise it is computed at once. Under autocast x and W are cast as in torch.
The tensors before the cast are saved, so that a gathered x can be dropped and gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

Job = tuple[Callable[[], Tensor], Tensor]
"""A deferred weight gradient, and the weight that it belongs to."""


@dataclass
class JobSlot:
    """Holds the list that takes deferred weight gradients; None if they are computed at once."""

    rest: list[Job] | None = None
    spend: Callable[[int], None] | None = None
    """Called with the multiply-adds of every product, on an emulated device."""


def _spend(slot: JobSlot, count: int) -> None:
    if slot.spend is not None and count:
        slot.spend(count)


class _Product(Function):
    """x @ W^T for W as (out, in), or x @ W for W as (in, out), computed in a given dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, slot: JobSlot, dtype: torch.dtype) -> Tensor:
        """Returns the product."""
        ctx.save_for_backward(x, weight)
        ctx.call = weight, transposed, slot, dtype
        _spend(slot, x.numel() * weight.shape[1 if transposed else 0])
        used = weight.to(dtype)
        return torch.matmul(x.to(dtype), used if transposed else used.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Returns the gradient of x, and that of the weight unless it is deferred."""
        x, saved = ctx.saved_tensors
        weight, transposed, slot, dtype = ctx.call
        used = saved.to(dtype)
        gx = torch.matmul(g, used.t() if transposed else used).to(x.dtype) if ctx.needs_input_grad[0] else None
        _spend(slot, g.numel() * x.shape[-1] if gx is not None else 0)
        if not ctx.needs_input_grad[1]:
            return gx, None, None, None, None
        rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])

        def job() -> Tensor:
            _spend(slot, grads.numel() * rows.shape[-1])
            cast = rows.to(dtype)
            return torch.mm(cast.t(), grads) if transposed else torch.mm(grads.t(), cast)

        if slot.rest is None or not weight.is_leaf:  # a weight that was moved like an activation gets its gradient like one
            return gx, job().to(weight.dtype), None, None, None
        slot.rest.append((job, weight))
        return gx, None, None, None, None


_product: Callable[[Tensor, Tensor, bool, JobSlot, torch.dtype], Tensor] = _Product.apply


def autocast_dtype(device: str) -> torch.dtype | None:
    """Returns the dtype of products under autocast; None without autocast."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class SplitProduct(nn.Module):
    """A product whose weight gradient can be deferred."""

    def __init__(self, slot: JobSlot) -> None:
        super().__init__()
        self.slot = slot

    def forward(self, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        """Returns the product."""
        return _product(x, weight, transposed, self.slot, autocast_dtype(x.device.type) or x.dtype)


@torch.no_grad()
def add_to_grad(weight: Tensor, gradient: Tensor) -> None:
    """Adds to the gradient of a tensor."""
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype, copy=True)
    else:
        weight.grad.add_(gradient)
