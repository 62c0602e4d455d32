"""The tensors that GPU kernels save, if CPU kernels save others: fused attention and dropout.

A GPU computes attention without the matrix of scores, with dropout or a mask too, and keeps one byte per element of a dropout.
The functions here have no results: they run on tensors without values, to count bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.cut.op_modules import Switched
from meshwright.capture.cut.stage_modules import Captured
from meshwright.capture.trace.operations import is_one_of, name_of

ATTENTION = ("aten.scaled_dot_product_attention",)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        heads, length = query.shape[-3:-1]  # these kernels return rows of all heads, transposed
        found = query.new_empty((*query.shape[:-3], length, heads, value.shape[-1])).transpose(-2, -3)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, found, sums, *(() if mask is None else (mask,)))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _, *mask = ctx.saved_tensors
        bias = torch.empty_like(mask[0]) if mask and ctx.needs_input_grad[3] else None
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), bias


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


class GpuDropout(nn.Module):
    """Keeps what dropout of a GPU keeps."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like x."""
        found: Tensor = _Dropout.apply(x)
        return found


class GpuAttention(nn.Module):
    """Keeps what fused attention of a GPU keeps."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of attention, without values."""
        return gpu_attention(*args, **kwargs)


def gpu_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the result of attention, without values. A mask of True and False is kept in the format of the query."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if attn_mask is not None and attn_mask.dtype != query.dtype:
        attn_mask = attn_mask.to(query.dtype)
    found: Tensor = _Attention.apply(query, key, value, attn_mask)
    return found


def as_on_gpu(layer: Captured) -> Captured:
    """Replace attention and dropout of a layer. Returns the layer itself."""
    body = layer.body
    for name, module in list(body.named_modules()):
        if isinstance(module, nn.Dropout) and module.p > 0:
            body.set_submodule(name, GpuDropout())
        elif isinstance(module, Switched) and is_one_of(module.target, ATTENTION):
            body.set_submodule(name, GpuAttention())
    for node in body.graph.nodes:
        if node.op == "call_function" and is_one_of(name_of(node.target), ATTENTION):
            node.target = gpu_attention
    body.recompile()
    return layer
