"""Autograd functions that can defer their weight gradient: one per kind of Linear-like module.

Each computes what torch's own derivative computes, with the same operations in the same order, so results are equal bit for bit.
If the slot of its module holds a rest when the backward runs, the weight gradient is queued there as a job over
(input, grad_output). Otherwise it is returned as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from meshwright.torch_internals import Geometry, convolution_gradients, embedding_gradient

Gradients = Sequence[Tensor | None]
Rest = list[tuple[Callable[[], Gradients], Sequence[Tensor | None]]]
"""The weight-gradient jobs that one microbatch leaves for its W, each with the parameters that its gradients belong to."""


class DeferredSlot:
    """Holds the rest that takes the weight gradients of one module. Its autograd functions read it when their backward runs."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest: Rest | None = None


class _Product(Function):
    """rows @ matrix (+ bias), where the matrix is `weight` or its transpose."""

    @staticmethod
    def forward(ctx: Any, slot: DeferredSlot, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """Returns the product, computed in one operation."""
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[1] else None)
        matrix = weight.t() if transposed else weight
        # With saved_tensors_hooks, saved tensors may be returned as other objects. Gradients belong to the ones given here.
        ctx.call = slot, (weight, bias), transposed, _by_column(x), _by_column(matrix)
        ctx.set_materialize_grads(False)
        return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Returns the input gradient. Returns or defers the gradients of weight and bias."""
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        slot, targets, transposed, x_by_column, by_column = ctx.call
        grad_x = None
        if weight is not None:
            back = weight if transposed else weight.t()
            grad_x = back.t().mm(grad.t()).t() if x_by_column else grad.mm(back)
        needs_bias = ctx.needs_input_grad[3]
        if slot.rest is None:
            return None, grad_x, *_product_rest(x, grad, by_column, transposed, needs_bias), None
        # Detached, because an input with a grad_fn would keep the whole graph alive until W.
        slot.rest.append((partial(_product_rest, x.detach(), grad, by_column, transposed, needs_bias), targets))
        return None, grad_x, None, None, None


def _by_column(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0)


def _product_rest(x: Tensor, grad: Tensor, by_column: bool, transposed: bool, needs_bias: bool) -> Gradients:
    # torch returns a gradient in the layout of its matrix, and the order of the factors affects the last bits.
    product = grad.t().mm(x) if by_column else x.t().mm(grad)
    return product if by_column == transposed else product.t(), grad.sum(0) if needs_bias else None


class _Lookup(Function):
    """Rows of `weight` by index. The row `padding` gets no gradient."""

    @staticmethod
    def forward(ctx: Any, slot: DeferredSlot, index: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Returns the rows."""
        ctx.save_for_backward(index)
        ctx.call = slot, weight, -1 if padding is None else padding
        ctx.set_materialize_grads(False)
        return functional.embedding(index, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Returns or defers the gradient of the weight. The index has none."""
        if grad is None:
            return None, None, None, None
        (index,) = ctx.saved_tensors
        slot, weight, padding = ctx.call
        if slot.rest is None:
            return None, None, *_lookup_rest(index, grad, weight.shape[0], padding), None
        slot.rest.append((partial(_lookup_rest, index, grad, weight.shape[0], padding), (weight,)))
        return None, None, None, None


def _lookup_rest(index: Tensor, grad: Tensor, rows: int, padding: int) -> Gradients:
    return (embedding_gradient(grad, index, rows, padding),)


class _Convolution(Function):
    """A convolution of a batch with zero padding, in one, two or three dimensions."""

    @staticmethod
    def forward(ctx: Any, slot: DeferredSlot, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        """Returns the convolution."""
        ctx.save_for_backward(x, weight)
        ctx.call = slot, (weight, bias), geometry
        ctx.set_materialize_grads(False)
        stride, padding, dilation, groups = geometry
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Returns the input gradient. Returns or defers the gradients of weight and bias."""
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        slot, targets, geometry = ctx.call
        _, needs_x, _, needs_bias, _ = ctx.needs_input_grad
        if slot.rest is None:
            return None, *convolution_gradients(grad, x, weight, geometry, [needs_x, True, needs_bias]), None
        slot.rest.append((partial(_convolution_rest, x.detach(), grad, targets[0], geometry, needs_bias), targets))
        grad_x = convolution_gradients(grad, x, weight, geometry, [True, False, False])[0] if needs_x else None
        return None, grad_x, None, None, None


def _convolution_rest(x: Tensor, grad: Tensor, weight: Tensor, geometry: Geometry, needs_bias: bool) -> Gradients:
    return convolution_gradients(grad, x, weight, geometry, [False, True, needs_bias])[1:]


# Function.apply is untyped.
product: Callable[[DeferredSlot, Tensor, Tensor, Tensor | None, bool], Tensor] = _Product.apply
lookup: Callable[[DeferredSlot, Tensor, Tensor, int | None], Tensor] = _Lookup.apply
convolution: Callable[[DeferredSlot, Tensor, Tensor, Tensor | None, Geometry], Tensor] = _Convolution.apply
