"""Represents a tensor by a few numbers, and measures how far two tensors are apart.

Complete gradients of a large model take as much memory as the model. Only the norm and three projections on fixed waves are kept
of each tensor. A projection is linear, so a gradient that arrives in parts is marked part by part.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, isnan

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""The largest relative distance of two runs in a dtype that counts as equal."""

_WIDTH = 1024
_WAVES = ((1.7, 0.3), (0.61, 1.1), (2.9, 0.5))
"""Frequency and phase of each projection."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The norm of a tensor, or the sum of the norms of its parts, and its projections."""

    norm: float
    projections: tuple[float, ...]

    def __add__(self, other: Mark) -> Mark:
        return Mark(self.norm + other.norm, tuple(a + b for a, b in zip(self.projections, other.projections, strict=True)))


ZERO = Mark(0.0, (0.0,) * len(_WAVES))
"""The mark of a gradient that did not arrive."""


def mark(tensor: Tensor) -> Mark:
    """Return the mark of a tensor of any dtype and shape."""
    flat = tensor.detach().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.double() if flat.numel() < 1 << 20 else flat.float()
    if not flat.numel():
        return ZERO
    width = min(_WIDTH, flat.numel())
    rest = flat.numel() % width
    place = torch.arange(width, dtype=flat.dtype, device=flat.device).unsqueeze(1)
    step, phase = torch.tensor(_WAVES, dtype=flat.dtype, device=flat.device).T
    waves = torch.cos(place * step + phase)
    rows = (flat[: flat.numel() - rest].view(-1, width) @ waves).double()
    outer = torch.sin(torch.arange(len(rows), dtype=torch.float64, device=flat.device) * 0.9 + 0.7)
    found = outer @ rows
    if rest:
        found = found + (flat[-rest:] @ waves[:rest]).double()
    return Mark(float(torch.linalg.vector_norm(flat)), tuple(found.tolist()))


def apart(one: Mark, other: Mark, floor: float = 0.0) -> float:
    """Return the distance of two tensors relative to the larger norm, or relative to `floor` if that is larger.

    Tensors that are not finite count as equal if both have the same projections (nan equals nan).
    """
    pairs = list(zip(one.projections, other.projections, strict=True))
    if not all(isfinite(a) and isfinite(b) for a, b in pairs):
        return 0.0 if all(a == b or (isnan(a) and isnan(b)) for a, b in pairs) else inf
    return max(abs(a - b) for a, b in pairs) / max(one.norm, other.norm, floor, 1e-30)
