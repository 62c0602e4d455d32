"""Greedy generation under any plan: the tokens that the model in one process would give.

Every new token is one forward-only walk over the sequences as they are so far; the rows of a batch are microbatches, so
several sequences are in flight at once. Only the chosen tokens travel back. There is no cache of keys and values: this is
for samples and for generation metrics during training, not for serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.runtime.forward import Forward, Outputs

INPUTS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"


def generate(
    forward: Forward,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
    columns: Sequence[str] | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The most likely continuation of each row, one token after another, on every rank.

    With `decoder_start_token_id` the model has an encoder, which reads `input_ids`; what is returned is the decoder's.
    `columns` are what the model takes by name, () where it takes tokens alone by position; `more` are columns that stay
    as they are. A row that has ended is filled with `pad_token_id`.
    """
    ends = torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ()), dtype=input_ids.dtype)
    _refuse(input_ids, attention_mask, max_new_tokens)
    pad = pad_token_id if pad_token_id is not None else int(ends[0]) if len(ends) else 0
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    encoder = decoder_start_token_id is not None
    tokens = torch.full_like(input_ids[:, :1], decoder_start_token_id) if decoder_start_token_id is not None else input_ids
    going = torch.ones(len(input_ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        given = {INPUTS: input_ids, MASK: mask, "decoder_input_ids": tokens} if encoder else {INPUTS: tokens, MASK: mask}
        if columns is not None and POSITIONS in columns and not encoder:
            given[POSITIONS] = positions(mask)
        chosen = _next(forward, given | dict(more or {}), columns)
        chosen = torch.where(going, chosen.to(tokens.dtype), pad)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        if not encoder:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        going = going & ~torch.isin(chosen, ends)
        if not going.any():
            break
    return tokens


def _next(forward: Forward, given: Mapping[str, Tensor], columns: Sequence[str] | None) -> Tensor:
    """The most likely next token of every row."""
    if columns is None or len(columns):
        batch: Mapping[str, Tensor] | Sequence[Tensor] = {n: t for n, t in given.items() if columns is None or n in columns}
    else:
        batch = (given[INPUTS],)
    found = forward(batch, outputs=Outputs.EVERYBODY, reduce=_most_likely, loss=False)
    return found.outputs[0]


def _most_likely(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The first output has scores for every position; those of the last one count."""
    if not outputs or outputs[0].dim() != 3:
        shapes = [tuple(t.shape) for t in outputs]
        raise MeshwrightError(f"the model returns {shapes}: no scores of rows x positions x tokens", fix="a language model")
    return (outputs[0][:, -1].float().argmax(dim=-1),)


def positions(mask: Tensor) -> Tensor:
    """Positions that start behind the padding on the left."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def _refuse(input_ids: Tensor, mask: Tensor | None, count: int) -> None:
    if input_ids.dim() != 2 or not input_ids.numel():
        raise MeshwrightError(f"input_ids are {tuple(input_ids.shape)}", fix="rows x positions, at least one of each")
    if mask is not None and mask.shape != input_ids.shape:
        raise MeshwrightError(f"attention_mask is {tuple(mask.shape)}, input_ids are {tuple(input_ids.shape)}")
    if count < 1:
        raise MeshwrightError(f"max_new_tokens must be at least 1, got {count}", fix="max_new_tokens=20")
    if mask is not None and not bool((mask[:, -1] != 0).all()):
        raise MeshwrightError("some rows are padded on the right: their next token would follow padding", fix="pad on the left")
