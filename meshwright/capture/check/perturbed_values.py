"""Values that are all alike hide differences: a gate that starts at zero, an average that nothing has moved yet.

While a model is checked, parameters and buffers that hold one value throughout hold different ones near it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SAMPLE = 64
"""Elements that are looked at before a whole tensor is."""


@contextmanager
def stirred(model: nn.Module) -> Iterator[None]:
    """Give what is constant other values, and its own back at the end."""
    every = dict.fromkeys((*model.parameters(), *model.buffers()))
    kept = {t: t.detach().clone() for t in every if _is_constant(t)}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for tensor, values in kept.items():
                noise = torch.rand(tensor.shape, generator=generator).to(tensor)
                tensor.copy_(values * (0.9 + 0.2 * noise) if values.flatten()[0].abs() >= 0.1 else values + 0.05 + 0.1 * noise)
        yield
    finally:
        with torch.no_grad():
            for tensor, values in kept.items():
                tensor.copy_(values)


def _is_constant(tensor: Tensor) -> bool:
    """Does it hold numbers, and one number only?"""
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return False
    values = tensor.detach().flatten()
    return bool((values[:_SAMPLE] == values[0]).all()) and bool((values == values[0]).all())
