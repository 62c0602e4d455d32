"""One tensor in the place of another, for everybody who holds it: parameters stay the objects they are, and tied."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def put(tensor: Tensor, value: Tensor) -> None:
    """Let a parameter or buffer be on the storage of `value`, on whatever device that is; its own attributes stay."""
    new = value.detach()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    else:
        new.requires_grad_(tensor.requires_grad)
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)
