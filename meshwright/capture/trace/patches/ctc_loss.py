"""The CTC loss while a model is traced: torch cannot trace its own, whose inner table is as long as the longest target.

One operation of the same shape stands for it; a captured layer calls torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.trace.patches.replaced_attribute import replaced


@torch.library.custom_op("meshwright::ctc_loss", mutates_args=())
def ctc_loss(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """What stands in a trace for `torch.ctc_loss`, whose arguments it has; never run as it is."""
    raise AssertionError("a captured layer calls the loss itself")


@ctc_loss.register_fake
def _(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    return scores.new_empty(scores.shape[1:-1] if reduction == 0 else ())


@contextmanager
def ctc_whole() -> Iterator[None]:
    """While a model is traced: a CTC loss whose lengths are tensors is one operation."""
    real = torch.ctc_loss

    def stand(*args: Any, **kwargs: Any) -> Tensor:
        tensors = all(isinstance(lengths, Tensor) for lengths in args[2:4]) and torch.compiler.is_exporting()
        found: Tensor = (ctc_loss if tensors else real)(*args, **kwargs)
        return found

    with replaced(torch, "ctc_loss", stand):
        yield
