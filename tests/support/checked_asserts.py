"""Checks of values in a forward, in a file whose asserts are Python's own: pytest writes those of tests anew."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.trace.patches.value_checks import passing


def checked(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """What it was given, looked at in every way."""
    if labels is not None and labels.max() >= 8:
        raise ValueError(f"labels up to {labels.max()}")
    if not torch.isfinite(x).all():
        message = "not finite"
        raise ValueError(message)
    assert (labels >= 0).all(), "negative labels"
    if labels.min().item() < 0:
        raise ValueError("negative")
    return x


def answers() -> list[bool | None]:
    """How branches are answered of which one side only raises, and then such of which none does."""
    found: list[bool | None] = []

    class Asked:
        def __bool__(self) -> bool:
            found.append(passing(sys._getframe(1)))
            return bool(found[-1])

    t, x = Asked(), 0
    if x is not None and t:
        raise ValueError(f"{x}")
    if x or t:
        raise ValueError
    if not t:
        raise ValueError("no") from None
    assert t
    assert not t
    for _ in range(1):
        with torch.no_grad():
            if t:
                raise ValueError
    if t:
        x = 1
    else:
        raise ValueError
    if t:
        x = 2
    y = 1 if t else 2
    if t and x == y:
        raise ValueError
    try:
        if t:
            raise ValueError
    except ValueError:
        pass
    return found
