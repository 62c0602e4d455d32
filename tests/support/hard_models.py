"""Ordinary models that are hard to capture: what they compute is easily lost in a trace; workers import this by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, CLASSES = 24, 8, 5


class Base(nn.Module):
    """Features to classes through a body of four layers; others change what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        """All but the head."""
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A mean cross entropy, and scores."""
        scores = self.head(self.body(x))
        return functional.cross_entropy(scores, labels), scores


class Shifted(nn.Module):
    """Decoder inputs made from labels in place, as mBART makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.line, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, labels: Tensor) -> tuple[Tensor]:
        """Predict each label from a changed copy of all."""
        p = labels.clone()
        p.masked_fill_(p == 3, 1)
        p[:, 0] = 5
        x = torch.tanh(self.line(self.embed(p)))
        return (functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()),)


class Words(nn.Module):
    """Tokens to the next token, padding allowed; others change how they walk over it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.line, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def body(self, x: Tensor) -> Tensor:
        """One layer."""
        return torch.tanh(self.line(x))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        """A mean cross entropy."""
        scores = self.head(self.body(self.embed(input_ids)))
        return (functional.cross_entropy(scores.flatten(0, 1), labels.flatten()),)


class Loops(Words):
    """A recurrence over the length, unrolled by a trace."""

    def body(self, x: Tensor) -> Tensor:
        """A state that walks along."""
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.line(x[:, t] + state))
            found.append(state)
        return torch.stack(found, 1)


class Branches(Words):
    """Long rows take another way than short ones."""

    def body(self, x: Tensor) -> Tensor:
        """One layer or two."""
        x = torch.tanh(self.line(x))
        return torch.tanh(self.line(x)) if x.shape[1] > 10 else x


class BySize(Base):
    """A sum divided by a Python number of rows."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """A mean, by hand."""
        return (functional.cross_entropy(self.head(self.body(x)), labels, reduction="sum") / len(labels),)


class Reentrant(Base):
    """Checkpoints of the old kind."""

    def body(self, x: Tensor) -> Tensor:
        """Layers that are run again in backward."""
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class StraightThrough(Base):
    """Rounded forward, as it is backward."""

    def body(self, x: Tensor) -> Tensor:
        """Rounded at the end."""
        return _Round.apply(super().body(x))


class Reversal(Base):
    """Gradients turned around."""

    def body(self, x: Tensor) -> Tensor:
        """Reversed at the end."""
        return _Reversed.apply(super().body(x))


class TensorHook(Base):
    """A hook on a value inside forward."""

    def body(self, x: Tensor) -> Tensor:
        """Half of the gradient."""
        found = super().body(x)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient * 0.5)
        return found


class ModuleHook(Base):
    """A backward hook of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(_half)


def _half(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in inputs)


class _OwnOrder(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + torch.tanh(layer(x))
        return x


class OwnSequential(Base):
    """A part that is an nn.Sequential with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _OwnOrder(*self.layers)

    def body(self, x: Tensor) -> Tensor:
        """Residual layers."""
        return self.layers(self.first(x))


class TopSequential(nn.Sequential):
    """A whole model that is an nn.Sequential with a forward of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A skip over the middle."""
        x = self[0](x)
        scores = self[2](x + torch.tanh(self[1](x)))
        return functional.cross_entropy(scores, labels), scores


class Modes(Base):
    """A module with parameters that does something else in evaluation."""

    def body(self, x: Tensor) -> Tensor:
        """Larger in training."""
        x = super().body(x)
        return x * 1.5 if self.training else x


class Counting(Base):
    """A Python number that changes with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def body(self, x: Tensor) -> Tensor:
        """Smaller and smaller."""
        self.n += 1
        return super().body(x) / (1.0 + 0.1 * self.n)


class PythonRandom(Base):
    """Draws from Python's generator."""

    def body(self, x: Tensor) -> Tensor:
        """Scaled at random."""
        return super().body(x) * (0.5 + random.random())


class Listing(Base):
    """Keeps what it saw in a list, and goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def body(self, x: Tensor) -> Tensor:
        """Larger every time."""
        self.seen.append(1)
        return super().body(x) * len(self.seen)


class Mapped(Base):
    """vmap inside forward."""

    def body(self, x: Tensor) -> Tensor:
        """Row by row."""
        return torch.vmap(super().body)(x)


class Noisy(Base):
    """A variational layer: draws in training and in evaluation."""

    def body(self, x: Tensor) -> Tensor:
        """With noise on top."""
        x = super().body(x)
        return x + 0.1 * torch.randn_like(x)


class Dropping(Base):
    """Dropout, and a draw that nobody uses."""

    def body(self, x: Tensor) -> Tensor:
        """As in families whose layers are dropped at a rate of zero."""
        torch.rand([])
        return functional.dropout(super().body(x), 0.3, self.training)


class Normed(Base):
    """Statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        """Normed over rows."""
        return self.norm(super().body(x))


Rows = Callable[[int], dict[str, Tensor]]


def features(rows: int = 8, *, step: int = 0) -> dict[str, Tensor]:
    """Vectors and classes."""
    drawn = torch.Generator().manual_seed(step + 1)
    return {
        "x": torch.randn(rows, 6, generator=drawn),
        "labels": torch.randint(0, CLASSES, (rows,), generator=drawn),
    }


def features_of_step(step: int) -> dict[str, Tensor]:
    """As `--batch` wants them."""
    return features(4, step=step)


def words(rows: int = 8, length: int = 12, *, step: int = 0) -> dict[str, Tensor]:
    """Tokens and labels."""
    drawn = torch.Generator().manual_seed(step + 1)
    tokens = torch.randint(0, WORDS, (rows, length), generator=drawn)
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


def only_labels(rows: int = 8, length: int = 12, *, step: int = 0) -> dict[str, Tensor]:
    """Labels alone."""
    return {"labels": words(rows, length, step=step)["labels"]}


CASES: dict[str, tuple[type[nn.Module], Callable[..., dict[str, Tensor]]]] = {
    "shifted": (Shifted, only_labels),
    "loops": (Loops, words),
    "branches": (Branches, words),
    "by size": (BySize, features),
    "reentrant": (Reentrant, features),
    "straight through": (StraightThrough, features),
    "reversal": (Reversal, features),
    "tensor hook": (TensorHook, features),
    "module hook": (ModuleHook, features),
    "own sequential": (OwnSequential, features),
    "top sequential": (TopSequential, features),
    "modes": (Modes, features),
    "counting": (Counting, features),
    "python random": (PythonRandom, features),
    "listing": (Listing, features),
    "mapped": (Mapped, features),
}
"""Each is trained right, or refused."""

REFUSED = {
    "by size": "depends on the number of rows",
    "tensor hook": r"a gradient hook \(register_hook\).*hard_models.py:",
    "module hook": r"layers\.1 has a backward hook",
    "counting": r"Counting\.n changes with every forward",
    "python random": "the forward draws from random",
    "listing": "differs from itself",
    "mapped": "",
}
"""Why some are refused; all others are trained right."""
