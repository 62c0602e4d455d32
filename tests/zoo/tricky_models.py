"""Models that no list names: what users write that a tracer may get wrong without a word."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zoo.batches import classes, noise
from tests.zoo.family import VOCABULARY, Batch, text

WIDTH = 16


class Words(nn.Module):
    """Embedding, four blocks, head; `inside` is what each case does between them, `before` to its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def before(self, ids: Tensor) -> Tensor:
        return ids

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + torch.tanh(layer(x))

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(self.before(input_ids))
        for layer in self.layers:
            x = self.inside(x, layer)
        return self.loss(self.head(x), labels)


class Shifted(Words):
    """Writes into a copy of its labels after it took values of it, as mBART does."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        p = labels.clone()
        p.masked_fill_(p == -100, 1)
        last = p[:, -1].clone()
        p[:, 1:] = p[:, :-1].clone()
        p[:, 0] = last
        return super().forward(p, labels)


class Straight(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Binary(Words):
    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + Straight.apply(layer(x))


class Hooked(Words):
    """A hook on a tensor of its forward."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        y = layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return x + y


class Reentrant(Words):
    """Reentrant checkpoints."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + checkpoint(lambda t: torch.tanh(layer(t)), x, use_reentrant=True)


class Checkpointed(Words):
    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + checkpoint(lambda t: torch.tanh(layer(t)), x, use_reentrant=False)


class ByMode(Words):
    """Another function in evaluation than in training."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + (torch.tanh(layer(x)) if self.training else layer(x))


class Counting(Words):
    """State that changes with every call."""

    calls = 0

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        self.calls += 1
        return x + torch.tanh(layer(x)) * (1 + 0.1 * self.calls)


class Dice(Words):
    """Python's random numbers."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + torch.tanh(layer(x)) * (random.random() if self.training else 1.0)


class ByLength(Words):
    """A branch on the length."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + torch.tanh(layer(x)) if x.shape[1] > 10 else x + layer(x)


class ByRows(Words):
    """A sum that is divided by the number of rows with Python."""

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        every = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        return every / len(labels)


class ByTokens(Words):
    """A masked mean, divided by hand: its weight cannot be seen."""

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        counts = (labels != -100).to(scores.dtype)
        every = functional.cross_entropy(scores.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view_as(counts)
        return (every * counts).sum() / counts.sum()


class Sparse(Words):
    """Experts that take the tokens that were sent to them: shapes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        for number, expert in enumerate(self.layers):
            at = torch.where(chosen == number)[0]
            out.index_add_(0, at, expert(flat[at]) * weight[at, None])
        return x + out.view_as(x)


class Mapped(Words):
    """vmap over rows."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + torch.func.vmap(lambda row: torch.tanh(layer(row)))(x)


class Einsum(Words):
    """Attention by hand, with a mask of infinities and a cumulative sum."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        scores = torch.einsum("bic,bjc->bij", layer(x), x) / WIDTH**0.5 + mask
        return x + torch.einsum("bij,bjc->bic", scores.softmax(-1), x) + 0.1 * x.cumsum(1)


class Sliced(Words):
    """Writes into slices of its hidden state."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        y = x.clone()
        y[:, ::2] = torch.tanh(layer(x))[:, ::2]
        y[..., 0] += 1.0
        y.mul_(0.9)
        return y


class Constants(Words):
    """Tensors made of Python's numbers, one of them written into."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        scale = torch.tensor([0.5, 2.0] * (WIDTH // 2), dtype=x.dtype, device=x.device)
        scale[0] = 3.0
        return x + torch.tanh(layer(x)) * scale + torch.tensor(list(range(WIDTH)), device=x.device)[None, :] * 0.01


class Spectral(Words):
    """Parametrised weights with a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))


class Numpy(Words):
    """Leaves torch."""

    def before(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(ids.numpy() % VOCABULARY)


class ByValue(Words):
    """A branch on values."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + layer(x) if x.sum() > 0 else x - layer(x)


class Early(Words):
    """Leaves the loop when all rows have ended."""

    def inside(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x if bool((x.abs().mean() > 100).item()) else x + torch.tanh(layer(x))


class Pair(nn.Module):
    """Two modalities of different lengths, one of them several pictures for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.tokens = nn.Conv2d(3, WIDTH, 8, 8), nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor) -> Tensor:
        count = pixel_values.shape[1]
        seen = self.see(pixel_values.flatten(0, 1)).flatten(2).transpose(1, 2)
        x = torch.cat([seen.unflatten(0, (-1, count)).flatten(1, 2), self.tokens(input_ids)], 1)
        for layer in self.attention:
            x = x + layer(x, x, x, need_weights=False)[0]
        return functional.cross_entropy(self.head(x.mean(1)), labels)


def pair(rows: int, length: int, seed: int) -> Batch:
    return {
        "input_ids": text(rows, length, seed)["input_ids"],
        "pixel_values": noise(seed, rows, 2, 3, 16, 16),
        "labels": classes(seed, rows),
    }


class Backward(Words):
    """A backward hook of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda module, inside, outside: (inside[0] * 2,))


class Forward(Words):
    """A forward hook of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, given, output: output * 2)


class Dictionary(Words):
    """Keeps what passes in a dictionary, as feature extractors do, and adds it up."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        kept = {"first": self.tokens(input_ids)}
        x = kept["first"]
        for at, layer in enumerate(self.layers):
            kept[f"at {at}"] = x = self.inside(x, layer)
        scores = self.head(sum(kept.values()))  # type: ignore[arg-type]
        return {"loss": self.loss(scores, labels), "logits": scores}


class Summed(nn.Module):
    """A sum over rows: not a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x).squeeze(1), y, reduction="sum")
