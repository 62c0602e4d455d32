"""Makes the CTC loss traceable. Torch cannot trace its own, because the size of an inner table depends on the longest target.

During tracing one custom operation of the same shape replaces it; a captured layer calls torch's own loss.
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
    """Placeholder for `torch.ctc_loss` in a trace, with the same arguments; it is never run."""
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
    """While a model is traced, record a CTC loss whose lengths are tensors as one operation."""
    real = torch.ctc_loss

    def stand(*args: Any, **kwargs: Any) -> Tensor:
        tensors = all(isinstance(lengths, Tensor) for lengths in args[2:4]) and torch.compiler.is_exporting()
        found: Tensor = (ctc_loss if tensors else real)(*args, **kwargs)
        return found

    with replaced(torch, "ctc_loss", stand):
        yield
