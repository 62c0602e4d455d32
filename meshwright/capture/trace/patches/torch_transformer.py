"""Replaces the places where `nn.Transformer` and its parts read tensor values by code that computes the same without reading.

Masks: without a hint, torch checks whether a mask is causal, to choose a faster kernel. While a model is traced the answer is no,
and the mask itself is used.

Padding: in evaluation without gradients `nn.TransformerEncoder` packs the rows, and padded positions become 0. A trace follows
the other path, which computes values there, and a loss or a later layer may read them. While a model is traced, both results are
computed and the mode selects one. As in torch, nothing is zeroed if a batch (here: a microbatch) has padding that is not at the
end of its rows. Under autocast torch does not pack, but captured layers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.trace.patches.train_eval_modes import mode


@contextmanager
def nothing_asked(model: nn.Module) -> Iterator[None]:
    """While a model is traced, torch's encoders and decoders read no tensor values."""
    stacks = [m for m in model.modules() if type(m).forward in FORWARDS and "forward" not in vars(m)]
    try:
        for stack in stacks:
            stack.forward = partial(FORWARDS[type(stack).forward], stack)  # type: ignore[method-assign]
        yield
    finally:
        for stack in stacks:
            del stack.forward


def _decoder(
    decoder: nn.TransformerDecoder,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Tensor:
    """Run the forward of the decoder and use the mask as it is."""
    masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    return nn.TransformerDecoder.forward(decoder, tgt, memory, *masks, bool(tgt_is_causal), memory_is_causal)


def _encoder(
    encoder: Any,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Run the forward of the encoder with the mask as it is, and zero padded positions. The final norm runs after that."""
    norm, encoder.norm = encoder.norm, None
    try:
        found = nn.TransformerEncoder.forward(encoder, src, mask, src_key_padding_mask, bool(is_causal))
    finally:
        encoder.norm = norm
    packs = encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled()
    if packs and src_key_padding_mask is not None and mask is None and src.dim() == 3:
        padded = src_key_padding_mask if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask != 0
        at_the_end = ~(padded[:, :-1] & ~padded[:, 1:]).any()
        found = mode(found, found.masked_fill((padded & at_the_end).unsqueeze(-1), 0.0))
    return found if norm is None else norm(found)


FORWARDS: dict[Any, Any] = {nn.TransformerEncoder.forward: _encoder, nn.TransformerDecoder.forward: _decoder}
