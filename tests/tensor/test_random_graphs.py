"""Random small graphs under tensor modes: blocks in any order, branches, views, separate and fused q, k, v."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest import mark
from torch import Tensor, nn
from torch.nn import functional

from tests.support.sharded import Request, box, declared_words, grid, line, parity, reference, tesseract

WIDTH, HEADS, VOCABULARY = 16, 4, 24
BLOCKS = ("mlp", "gated", "separate", "fused", "interleaved", "grouped", "norm", "rms", "halves", "turned", "shifted", "running")
BLOCKS += ("scaled", "padded", "written", "picked", "pooled", "sorted", "narrow", "letters")
MODES = [line(2), line(2, sequence=True), line(4), box(2, 2, 1), box(1, 2, 2), box(2, 1, 2), grid(2), tesseract(2, 2)]


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Block(nn.Module):
    """One block of a kind, without its residual connection."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        wide = {"fused": 3 * WIDTH, "interleaved": 3 * WIDTH, "grouped": WIDTH + WIDTH}.get(kind, 2 * WIDTH)
        self.into, self.other, self.third = nn.Linear(WIDTH, wide), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH))
        self.one = nn.Linear(WIDTH, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(found.transpose(1, 2).flatten(2))

    def attention(self, x: Tensor) -> Tensor:
        match self.kind:
            case "separate":
                return self.attend(heads(self.third(x)), heads(self.out(x)), heads(self.other(x)[..., :WIDTH]))
            case "fused":
                return self.attend(*(heads(part) for part in self.into(x).chunk(3, -1)))
            case "interleaved":
                q, k, v = self.into(x).unflatten(-1, (HEADS, 3 * WIDTH // HEADS)).transpose(1, 2).chunk(3, -1)
                return self.attend(q, k, v)
        q, k, v = self.into(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        return self.attend(heads(q), heads(k, 2), heads(v, 2))

    def rearranged(self, x: Tensor) -> Tensor:
        match self.kind:
            case "halves":
                left, right = self.into(x).split([WIDTH // 2, 2 * WIDTH - WIDTH // 2], -1)
                return self.back(torch.cat([right, left.tanh()], -1))
            case "turned":
                return self.back(self.into(x).transpose(1, 2).softmax(-1).permute(0, 2, 1))
            case "shifted":
                return self.out(self.third(x).roll(1, 1).flip(-1))
            case "running":
                return self.out(self.third(x).cumsum(1) / 4)
            case "padded":
                return functional.pad(self.third(x), (1, 0, 0, 1))[:, 1:, 1:]
            case "written":
                y = self.third(x).clone()
                y[..., :4] = x[..., 4:8] * self.weight[:4]
                return y
            case "picked":
                return self.third(x)[:, torch.arange(x.shape[1] - 1, -1, -1)] * self.weight
        return self.third(x).sort(-1).values * self.weight

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "mlp":
                return self.back(functional.gelu(self.into(x)))
            case "gated":
                return self.back(functional.silu(self.into(x)) * self.other(x))
            case "separate" | "fused" | "interleaved" | "grouped":
                return self.attention(x)
            case "norm":
                return functional.layer_norm(x, (WIDTH,), self.weight, self.bias)
            case "rms":
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
            case "scaled":
                return self.third(x) * self.weight + self.bias
            case "pooled":
                return self.out(self.third(x).mean(1, keepdim=True).tanh()).expand_as(x)
            case "narrow":
                return torch.sigmoid(self.one(x)) * self.third(x)
            case "letters":
                return torch.einsum("bsd,de->bse", self.third(x), self.out.weight)
        return self.rearranged(x)


class Random(nn.Module):
    """Blocks in an order, each added to the stream or in its place, then a head and a loss."""

    def __init__(self, blocks: list[tuple[str, bool]], tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        self.blocks = nn.ModuleList(Block(kind) for kind, _ in blocks)
        self.added = [added for _, added in blocks]
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for block, added in zip(self.blocks, self.added, strict=True):
            x = x + block(x) if added else block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def check(blocks: list[tuple[str, bool]], tied: bool, asked: Request) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1).clone()
    labels[:, -1] = -100
    found = parity(reference(Random(blocks, tied), {"tokens": tokens, "labels": labels}), asked)
    assert found.loss <= 1e-12 and found.gradient <= 1e-12, found
    assert found.words == declared_words(found.settled)


GRAPHS = st.lists(st.tuples(st.sampled_from(BLOCKS), st.booleans()), min_size=1, max_size=4)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(GRAPHS, st.booleans(), st.sampled_from(MODES))
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=QUIET)
def test_a_few_random_graphs(blocks: list[tuple[str, bool]], tied: bool, asked: Request) -> None:
    check(blocks, tied, asked)


@mark.slow
@given(GRAPHS, st.booleans(), st.sampled_from(MODES))
@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
def test_many_random_graphs(blocks: list[tuple[str, bool]], tied: bool, asked: Request) -> None:
    check(blocks, tied, asked)


@mark.slow
@mark.parametrize("asked", MODES, ids=str)
@mark.parametrize("kind", BLOCKS)
def test_every_kind_of_block(kind: str, asked: Request) -> None:
    check([(kind, True), ("mlp", True)], False, asked)
