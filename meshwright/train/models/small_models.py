"""Small models for trying plans, as lists of layers: `mlp` and `gpt`, with data that exists on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention, then the feed-forward layers, each with a residual connection."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, c)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return their sum."""
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    """The last norm and the projection to the vocabulary."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.out(self.norm(x))


def gpt(
    *, blocks: int = 8, width: int = 32, heads: int = 4, length: int = 16, tied: bool = True, dropout: float = 0.0
) -> list[nn.Module]:
    """A byte-level GPT: embedding, blocks, head. With `tied`, embedding and head share their weight."""
    embedding, head = Embedding(256, length, width), Head(width, 256)
    if tied:
        head.out.weight = embedding.tokens.weight
    return [embedding, *(Block(width, heads, dropout) for _ in range(blocks)), head]


def mlp(*, layers: int = 16, width: int = 16, dropout: float = 0.0) -> list[nn.Module]:
    """Linear layers with a nonlinearity between them."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(layers - 1)]
    return [*hidden, nn.Linear(width, width)]


def mlp_batch(step: int, *, rows: int = 32, width: int = 16) -> tuple[Tensor, Tensor]:
    """Return noise, and targets computed from it."""
    random = torch.Generator().manual_seed(step + 1)
    x = torch.randn(rows, width, generator=random, dtype=torch.float64)
    return x, x.roll(1, dims=1).sin()


def text_batch(step: int, *, rows: int = 32, length: int = 16) -> tuple[Tensor, Tensor]:
    """Return bytes of a Python source file, and the bytes that follow them."""
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    data = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(step + 1)
    starts = torch.randint(0, len(data) - length - 1, (rows,), generator=random)
    rows_of = torch.stack([data[s : s + length + 1] for s in starts.tolist()])
    return rows_of[:, :-1].contiguous(), rows_of[:, 1:].contiguous()


def mlp_rows() -> list[tuple[Tensor, ...]]:
    """Return a data set for `mlp`."""
    return list(zip(*(column.float() for column in mlp_batch(0, rows=512)), strict=True))


def gpt_rows() -> list[tuple[Tensor, ...]]:
    """Return a data set for `gpt`."""
    return list(zip(*text_batch(0, rows=512), strict=True))
