"""Greedy generation under any plan. It returns the tokens that the model would return in one process.

Every new token takes one forward pass over the whole sequences so far. The rows of a batch are split into microbatches, so
several sequences are in the pipeline at once. Only the chosen tokens are sent back. There is no key-value cache: this is for
samples and for generation metrics during training, not for serving.

The padding of a prompt is moved to its right end, where a causal model does not see it. Each row continues after its own last
token. The positions are then correct without further inputs, and generation uses the same stages as training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.ir.placement import Rows
from meshwright.runtime.engine.evaluate import Forward, Outputs
from meshwright.runtime.stage.batch import Given

TOKENS, MASK, DECODER = "input_ids", "attention_mask", "decoder_input_ids"


def refuse_options(given: Iterable[str]) -> None:
    """Refuses options of other generation methods: sampling, beams, penalties."""
    known = [name for name in signature(generate).parameters if name not in ("forward", "input_ids")]
    if unknown := [name for name in given if name not in known]:
        raise MeshwrightError(
            f"generate has no option {unknown[0]!r}: it always takes the most likely token", fix=f"one of {', '.join(known)}"
        )


def generate(
    forward: Forward,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
    forced_bos_token_id: int | None = None,
    forced_eos_token_id: int | Sequence[int] | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Continues each row with its most likely tokens and returns the result on every rank. Stops when all rows have ended.

    With `decoder_start_token_id` the model has an encoder, which reads `input_ids`, and the decoder's tokens are returned.
    `more` are columns that stay the same for every token. A row that has ended is filled with `pad_token_id`. If
    `forced_eos_token_id` is given, it is the last of `max_new_tokens` tokens. If `forced_bos_token_id` is given, it follows a
    prompt of one token.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ends = torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ()), dtype=torch.long)
    pad = pad_token_id if pad_token_id is not None else int(ends[0]) if len(ends) else 0
    _refuse_prompts(input_ids, mask, max_new_tokens)
    if decoder_start_token_id is None:
        tokens, lengths = _padded_right(input_ids, mask, pad)
        fixed: dict[str, Tensor] = dict(more or {})
    else:
        tokens = torch.full_like(input_ids[:, :1], decoder_start_token_id)
        lengths = torch.ones(len(tokens), dtype=torch.long)
        fixed = {TOKENS: input_ids, MASK: mask, **(more or {})}
    _refuse_unread_mask(forward, tokens, lengths, mask, fixed, pad, encoder=decoder_start_token_id is not None)
    last = forced_eos_token_id if isinstance(forced_eos_token_id, int | None) else min(forced_eos_token_id)
    new = tokens[:, :0]
    unfinished = torch.ones(len(tokens), dtype=torch.bool)
    for number in range(max_new_tokens):
        forced = forced_bos_token_id if number == 0 and tokens.shape[1] == 1 else None
        forced = last if number == max_new_tokens - 1 and last is not None else forced
        if forced is None:
            chosen = _next_tokens(forward, tokens, lengths, fixed, encoder=decoder_start_token_id is not None)[0]
        else:
            chosen = torch.full_like(tokens[:, 0], forced)
        chosen = torch.where(unfinished, chosen, pad).to(tokens.dtype)
        new = torch.cat([new, chosen[:, None]], dim=1)
        unfinished = unfinished & ~torch.isin(chosen, ends)
        if not unfinished.any():
            break
        tokens, lengths = _appended(tokens, lengths, chosen, pad), lengths + 1
    return torch.cat([input_ids if decoder_start_token_id is None else tokens[:, :1], new], dim=1)


_PLAIN_GREEDY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "repetition_penalty", "encoder_repetition_penalty"), (1, 1.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "guidance_scale"), ()),
    "exponential_decay_length_penalty": (),
}
"""Options of a generation_config that change greedy tokens, each with the values that have no effect. None never has one."""


def special_tokens(model: Any) -> dict[str, Any]:
    """Returns the special tokens of a model's generation_config. Raises if the config has an option that is not supported."""
    config = getattr(model, "generation_config", None)
    for name, plain in _PLAIN_GREEDY.items():
        value = getattr(config, name, None)
        if value not in (None, *plain):
            raise MeshwrightError(
                f"the model's generation_config has {name}={value!r}, but only plain greedy generation is supported",
                fix=f"model.generation_config.{name} = None",
            )
    names = ["eos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id"]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        names.append("decoder_start_token_id")
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _padded_right(tokens: Tensor, mask: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Returns the rows with their padding at the right end, and their lengths."""
    order = (mask == 0).long().argsort(dim=1, stable=True)
    lengths = (mask != 0).sum(1)
    moved = tokens.gather(1, order)[:, : int(lengths.max())]
    is_padding = torch.arange(moved.shape[1])[None] >= lengths[:, None]
    return moved.masked_fill(is_padding, pad), lengths


def _appended(tokens: Tensor, lengths: Tensor, chosen: Tensor, pad: int) -> Tensor:
    """Adds one token to each row, after its last token."""
    if int(lengths.max()) == tokens.shape[1]:
        tokens = torch.cat([tokens, torch.full_like(tokens[:, :1], pad)], dim=1)
    return tokens.scatter(1, lengths[:, None], chosen[:, None])


def _next_tokens(
    forward: Forward, tokens: Tensor, lengths: Tensor, fixed: Mapping[str, Tensor], *, encoder: bool
) -> tuple[Tensor, Tensor]:
    """Returns the most likely next token of every row, and its score."""
    columns: tuple[str, ...] | None = getattr(forward.layers, "columns", None)
    mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
    given = {**fixed, DECODER: tokens} if encoder else {TOKENS: tokens, MASK: mask, **fixed}
    for name in TARGETS:
        if columns is not None and name in columns:
            # The loss is not used, but the graph reads labels. A decoder that takes labels as input shifts them right by one.
            given[name] = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1) if encoder else tokens
    if columns is not None and (missing := [name for name in columns if name not in given]):
        raise MeshwrightError(
            f"the model reads the column {missing[0]!r}", fix=f"more={{{missing[0]!r}: ...}}, one row per prompt"
        )
    batch: Given = (tokens,) if columns is None else {name: given[name] for name in columns}
    found = forward(batch, outputs=Outputs.EVERYBODY, reduce=partial(_most_likely, lengths, tokens.shape[1]), loss=False)
    return found.outputs[0], found.outputs[1]


def _most_likely(lengths: Tensor, positions: int, rows: Rows, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the most likely token and its score for each row. The first output has the scores of all positions."""
    if not outputs or outputs[0].dim() != 3:
        shapes = [tuple(t.shape) for t in outputs]
        raise MeshwrightError(
            f"the model returns {shapes}, not scores of shape (rows, positions, tokens)", fix="a language model"
        )
    scores = outputs[0]
    if scores.shape[1] != positions:
        raise MeshwrightError(
            f"the model returns scores for {scores.shape[1]} positions, but a row has {positions} tokens: the model adds "
            "positions, as prompt tuning does, so the position of a row's last token is unknown",
            fix="generate with the trained model in one process",
        )
    last = (lengths[rows.start : rows.stop] - 1).to(scores.device)
    best = scores[torch.arange(len(scores), device=scores.device), last].float().max(dim=-1)
    return best.indices, best.values


def _refuse_unread_mask(
    forward: Forward, tokens: Tensor, lengths: Tensor, mask: Tensor, fixed: Mapping[str, Tensor], pad: int, *, encoder: bool
) -> None:
    """Refuses padded prompts if the model reads the padding: it must read the mask, or only tokens to the left.

    An encoder reads all of its input. A decoder is tested: its result must not change if the padding has other tokens.
    """
    columns = getattr(forward.layers, "columns", None) or ()
    if MASK in columns or bool((mask != 0).all()):
        return
    fix = f"a data set with a column {MASK!r}, so that the model is captured with it, or prompts of one length"
    if encoder:
        raise MeshwrightError(
            f"the prompts are padded, and the model was captured without {MASK!r}: it would read the padding", fix=fix
        )
    is_padding = torch.arange(tokens.shape[1])[None] >= lengths[:, None]
    other = torch.where(is_padding, torch.where(tokens[:, :1] == pad, int(tokens.max()), tokens[:, :1]), tokens)
    one, two = (_next_tokens(forward, given, lengths, fixed, encoder=False) for given in (tokens, other))
    if not all(torch.equal(a, b) for a, b in zip(one, two, strict=True)):
        raise MeshwrightError(
            f"the prompts are padded, and the model, captured without {MASK!r}, reads the padding after the last token", fix=fix
        )


def _refuse_prompts(tokens: Tensor, mask: Tensor, count: int) -> None:
    if tokens.dim() != 2 or not tokens.numel() or tokens.is_floating_point():
        raise MeshwrightError(
            f"input_ids has shape {tuple(tokens.shape)} and dtype {tokens.dtype}", fix="integers of shape (rows, positions)"
        )
    if mask.shape != tokens.shape:
        raise MeshwrightError(f"attention_mask has shape {tuple(mask.shape)}, input_ids has shape {tuple(tokens.shape)}")
    if not bool((mask != 0).any(1).all()):
        raise MeshwrightError("a prompt has only padding: there is nothing to continue", fix="at least one token in each row")
    if count < 1:
        raise MeshwrightError(f"max_new_tokens must be at least 1, got {count}", fix="max_new_tokens=20")
