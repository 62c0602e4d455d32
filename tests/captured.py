"""Small models of many families, as their authors wrote them, and batches for them; workers import this by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, ROWS = 48, 10, 8


def text(step: int, *, rows: int = ROWS, length: int = LENGTH, padded: bool = True, ignored: bool = True) -> dict[str, Tensor]:
    """Tokens with padding at the end of some rows, and labels of which some are ignored."""
    random = torch.Generator().manual_seed(step + 1)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=random)
    mask = torch.ones_like(tokens)
    if padded:
        for row in range(rows):
            mask[row, length - row % 4 :] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if ignored:
        labels[torch.rand(rows, length, generator=random) < 0.2] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def gpt2(**more: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    base = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**(base | dropout | more)))
