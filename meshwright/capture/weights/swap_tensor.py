"""Replaces the content of a tensor for everyone who holds it: parameters remain the same objects and stay tied."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def put(tensor: Tensor, value: Tensor) -> None:
    """Move a parameter or buffer to the storage of `value`, on any device. Its Python attributes are kept."""
    new = value.detach()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    else:
        new.requires_grad_(tensor.requires_grad)
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)
