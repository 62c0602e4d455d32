"""Greedy generation under any plan: the tokens that the model in one process would give.

Every new token is one forward-only walk over the sequences as they are so far; the rows of a batch are microbatches, so
several sequences are in flight at once. Only the chosen tokens travel back. There is no cache of keys and values: this is
for samples and for generation metrics during training, not for serving.

Padding of a prompt is moved behind it, where a causal model does not see it, and each row goes on behind its own last token:
what the model is told of positions is then right by itself, and the stages that train are the stages that generate.
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
    """Refuse what only another way of continuing takes: sampling, beams, penalties."""
    known = [name for name in signature(generate).parameters if name not in ("forward", "input_ids")]
    if unknown := [name for name in given if name not in known]:
        raise MeshwrightError(
            f"generate does not take {unknown[0]!r}: it continues with the most likely token", fix=f"one of {', '.join(known)}"
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
    """The most likely continuation of each row, one token after another, on every rank; it ends when all rows have ended.

    With `decoder_start_token_id` the model has an encoder, which reads `input_ids`; what is returned is the decoder's.
    `more` are columns that stay as they are. A row that has ended is filled with `pad_token_id`. The last token that there is
    room for is `forced_eos_token_id`, and the one behind a single first token `forced_bos_token_id`, where they are given.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ends = torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ()), dtype=torch.long)
    pad = pad_token_id if pad_token_id is not None else int(ends[0]) if len(ends) else 0
    _refuse(input_ids, mask, max_new_tokens)
    if decoder_start_token_id is None:
        tokens, lengths = _moved(input_ids, mask, pad)
        still: dict[str, Tensor] = dict(more or {})
    else:
        tokens = torch.full_like(input_ids[:, :1], decoder_start_token_id)
        lengths = torch.ones(len(tokens), dtype=torch.long)
        still = {TOKENS: input_ids, MASK: mask, **(more or {})}
    _refuse_unseen(forward, tokens, lengths, mask, still, pad, encoder=decoder_start_token_id is not None)
    last = forced_eos_token_id if isinstance(forced_eos_token_id, int | None) else min(forced_eos_token_id)
    new = tokens[:, :0]
    going = torch.ones(len(tokens), dtype=torch.bool)
    for number in range(max_new_tokens):
        forced = forced_bos_token_id if number == 0 and tokens.shape[1] == 1 else None
        forced = last if number == max_new_tokens - 1 and last is not None else forced
        if forced is None:
            chosen = _next(forward, tokens, lengths, still, encoder=decoder_start_token_id is not None)[0]
        else:
            chosen = torch.full_like(tokens[:, 0], forced)
        chosen = torch.where(going, chosen, pad).to(tokens.dtype)
        new = torch.cat([new, chosen[:, None]], dim=1)
        going = going & ~torch.isin(chosen, ends)
        if not going.any():
            break
        tokens, lengths = _longer(tokens, lengths, chosen, pad), lengths + 1
    return torch.cat([input_ids if decoder_start_token_id is None else tokens[:, :1], new], dim=1)


_GREEDY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "repetition_penalty", "encoder_repetition_penalty"), (1, 1.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "guidance_scale"), ()),
    "exponential_decay_length_penalty": (),
}
"""What a generation_config may say that changes the most likely tokens, and the values besides None that do not."""


def configured(model: Any) -> dict[str, Any]:
    """The special tokens of a model's generation_config; what it asks for and is not done here is refused by name."""
    config = getattr(model, "generation_config", None)
    for name, plain in _GREEDY.items():
        value = getattr(config, name, None)
        if value not in (None, *plain):
            raise MeshwrightError(
                f"the model's generation_config has {name}={value!r}, and only plain greedy tokens are generated",
                fix=f"model.generation_config.{name} = None",
            )
    names = ["eos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id"]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        names.append("decoder_start_token_id")
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _moved(tokens: Tensor, mask: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Every row with its padding at the end, and its length."""
    order = (mask == 0).long().argsort(dim=1, stable=True)
    lengths = (mask != 0).sum(1)
    moved = tokens.gather(1, order)[:, : int(lengths.max())]
    behind = torch.arange(moved.shape[1])[None] >= lengths[:, None]
    return moved.masked_fill(behind, pad), lengths


def _longer(tokens: Tensor, lengths: Tensor, chosen: Tensor, pad: int) -> Tensor:
    """Each row with one more token behind its last."""
    if int(lengths.max()) == tokens.shape[1]:
        tokens = torch.cat([tokens, torch.full_like(tokens[:, :1], pad)], dim=1)
    return tokens.scatter(1, lengths[:, None], chosen[:, None])


def _next(
    forward: Forward, tokens: Tensor, lengths: Tensor, still: Mapping[str, Tensor], *, encoder: bool
) -> tuple[Tensor, Tensor]:
    """The most likely next token of every row, and its score."""
    known: tuple[str, ...] | None = getattr(forward.layers, "columns", None)
    mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
    given = {**still, DECODER: tokens} if encoder else {TOKENS: tokens, MASK: mask, **still}
    for name in TARGETS:
        if known is not None and name in known:
            # No loss is wanted, but the graph reads labels; a decoder that is fed with them sees them one place later.
            given[name] = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1) if encoder else tokens
    if known is not None and (missing := [name for name in known if name not in given]):
        raise MeshwrightError(
            f"the model reads the column {missing[0]!r}", fix=f"more={{{missing[0]!r}: ...}}, one row per prompt"
        )
    batch: Given = (tokens,) if known is None else {name: given[name] for name in known}
    found = forward(batch, outputs=Outputs.EVERYBODY, reduce=partial(_most_likely, lengths, tokens.shape[1]), loss=False)
    return found.outputs[0], found.outputs[1]


def _most_likely(lengths: Tensor, positions: int, rows: Rows, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The first output has scores for every position; those of each row's last token count."""
    if not outputs or outputs[0].dim() != 3:
        shapes = [tuple(t.shape) for t in outputs]
        raise MeshwrightError(f"the model returns {shapes}: no scores of rows x positions x tokens", fix="a language model")
    scores = outputs[0]
    if scores.shape[1] != positions:
        raise MeshwrightError(
            f"the model returns scores for {scores.shape[1]} positions of {positions} tokens: it adds some of its own, as prompt "
            "tuning does, and which of them is a row's last is not known",
            fix="generate with the trained model in one process",
        )
    last = (lengths[rows.start : rows.stop] - 1).to(scores.device)
    best = scores[torch.arange(len(scores), device=scores.device), last].float().max(dim=-1)
    return best.indices, best.values


def _refuse_unseen(
    forward: Forward, tokens: Tensor, lengths: Tensor, mask: Tensor, still: Mapping[str, Tensor], pad: int, *, encoder: bool
) -> None:
    """A mask that says something needs a model that reads it, or one that does not look at what lies behind a token.

    An encoder looks at all of its input. Whether a decoder looks ahead is tried: other tokens in place of the padding.
    """
    known = getattr(forward.layers, "columns", None) or ()
    if MASK in known or bool((mask != 0).all()):
        return
    fix = f"a data set with a column {MASK!r}, so that the model is captured with it, or prompts of one length"
    if encoder:
        raise MeshwrightError(
            f"the prompts are padded, and the model was captured without {MASK!r}: it would read padding", fix=fix
        )
    behind = torch.arange(tokens.shape[1])[None] >= lengths[:, None]
    other = torch.where(behind, torch.where(tokens[:, :1] == pad, int(tokens.max()), tokens[:, :1]), tokens)
    one, two = (_next(forward, given, lengths, still, encoder=False) for given in (tokens, other))
    if not all(torch.equal(a, b) for a, b in zip(one, two, strict=True)):
        raise MeshwrightError(
            f"the prompts are padded, and the model looks at tokens behind the last one, captured without {MASK!r}", fix=fix
        )


def _refuse(tokens: Tensor, mask: Tensor, count: int) -> None:
    if tokens.dim() != 2 or not tokens.numel() or tokens.is_floating_point():
        raise MeshwrightError(f"input_ids are {tuple(tokens.shape)} of {tokens.dtype}", fix="rows x positions of whole numbers")
    if mask.shape != tokens.shape:
        raise MeshwrightError(f"attention_mask is {tuple(mask.shape)}, input_ids are {tuple(tokens.shape)}")
    if not bool((mask != 0).any(1).all()):
        raise MeshwrightError("a prompt is all padding: there is nothing to go on from", fix="at least one token in each row")
    if count < 1:
        raise MeshwrightError(f"max_new_tokens must be at least 1, got {count}", fix="max_new_tokens=20")
