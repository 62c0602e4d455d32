"""Padded places of `nn.TransformerEncoder`: in evaluation without gradients torch packs the rows, and such places become 0.

A trace follows the other path, which computes something there, and a loss or a later layer may look at it. While a model is
traced, both results are made, and the mode chooses. As in torch, nothing is zeroed where a batch (here: a microbatch) has
padding that is not at the end of its rows. Under autocast torch does not pack, and captured layers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.modes import mode


@contextmanager
def padding_zeroed(model: nn.Module) -> Iterator[None]:
    """While a model is traced: encoders that pack rows in evaluation zero their padded places then."""
    packs = [m for m in model.modules() if type(m) is nn.TransformerEncoder and m.use_nested_tensor and "forward" not in vars(m)]
    packs = packs if torch.backends.mha.get_fastpath_enabled() else []
    try:
        for encoder in packs:
            encoder.forward = partial(_zeroed, encoder)  # type: ignore[method-assign]
        yield
    finally:
        for encoder in packs:
            del encoder.forward


def _zeroed(
    encoder: Any,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """The encoder's forward; its norm comes after the zeros."""
    norm, encoder.norm = encoder.norm, None
    try:
        found = nn.TransformerEncoder.forward(encoder, src, mask, src_key_padding_mask, is_causal)
    finally:
        encoder.norm = norm
    if src_key_padding_mask is not None and mask is None and src.dim() == 3:
        padded = src_key_padding_mask if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask != 0
        at_the_end = ~(padded[:, :-1] & ~padded[:, 1:]).any()
        found = mode(found, found.masked_fill((padded & at_the_end).unsqueeze(-1), 0.0))
    return found if norm is None else norm(found)
