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


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(_decoder() | more)))


def _decoder() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def mixtral(**more: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**(_decoder() | experts | more)))


def bert(**more: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**(_decoder() | dropout | more)))


def t5(**more: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    base = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    rest = {"decoder_start_token_id": 0, "dropout_rate": 0.0, "tie_word_embeddings": True}
    return T5ForConditionalGeneration(T5Config(**(base | rest | more)))


def pairs(step: int) -> dict[str, Tensor]:
    """Two lengths: what is read, and what is written."""
    first, second = text(step), text(step + 100, length=7)
    return {**first, "labels": second["labels"]}


def vit(**more: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    base = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    rest = {"intermediate_size": 32, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**(base | rest | more)))


def pictures(step: int) -> dict[str, Tensor]:
    """Noise, and what it is said to show."""
    random = torch.Generator().manual_seed(step + 1)
    shown = torch.randn(ROWS, 3, 16, 16, generator=random, dtype=torch.float64)
    return {"pixel_values": shown, "labels": torch.randint(0, 5, (ROWS,), generator=random)}


def family(name: str, **more: Any) -> nn.Module:
    """A causal language model of a family by the name of its configuration."""
    import transformers

    config = getattr(transformers, f"{name}Config")
    return transformers.AutoModelForCausalLM.from_config(config(**(_decoder() | more)))


class LongSkip(nn.Module):
    """A plain module whose first hidden state is added again at the very end."""

    def __init__(self, width: int = 12, depth: int = 8, decoy: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.decoy = nn.Linear(width, VOCABULARY, bias=False) if decoy else None
        self.back = nn.Linear(VOCABULARY, width) if decoy else None
        self.last = nn.Linear(width, VOCABULARY, bias=False)
        self.last.weight = self.first.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        start = self.first(tokens)
        x = start
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.decoy is not None and self.back is not None:
            x = x + self.back(self.decoy(x))
        scores = self.last(x + start)
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """A batch as a tuple."""
    given = text(step)
    return given["input_ids"], given["labels"]


def only_tokens(step: int) -> tuple[Tensor]:
    """A batch that lacks its labels."""
    return (tokens(step)[0],)


def no_labels(step: int) -> dict[str, Tensor]:
    """The same by name."""
    return {"tokens": tokens(step)[0]}


class ChangesItsBatch(LongSkip):
    """Writes into its labels and tokens, as some models do to leave out padding."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        labels[labels < 9] = -100
        tokens.clamp_(min=5)
        labels.copy_(torch.where(tokens > 40, labels.new_full((), -100), labels))
        return super().forward(tokens, labels)


class Pictures(nn.Module):
    """Convolutions with norms that count, in blocks with skips, as in residual networks; in-place nonlinearities."""

    def __init__(self, width: int = 4, blocks: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 1), nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.last = nn.Linear(width, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(pixel_values)
        for block in self.blocks:
            x = functional.relu_(x + block(x))
        scores = self.last(x.mean(dim=(2, 3)))
        return {"loss": functional.cross_entropy(scores, labels), "logits": scores}
