"""Broadcast a tensor whose strides may differ between ranks (a transposed or channels_last weight).

`dist.broadcast` sends the memory of a tensor as it is. Where strides differ, the same memory has other values.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def broadcast_tensor(tensor: Tensor, *, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Copies the values of rank `src` into the tensor of every rank. Each rank keeps its own strides."""
    tensor = tensor.detach()
    dense = tensor.contiguous()
    dist.broadcast(dense, src=src, group=group)
    if dense.data_ptr() != tensor.data_ptr() or dense.stride() != tensor.stride():
        tensor.copy_(dense)
