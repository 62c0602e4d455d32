"""A family of the zoo: a small model as its authors wrote it, batches for it, and what its loss is a mean over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Items = Callable[[Mapping[str, Tensor]], float]

VOCABULARY = 64
IGNORED = -100


def rows(batch: Mapping[str, Tensor]) -> float:
    """A mean over rows."""
    return float(len(next(iter(batch.values()))))


def labels(batch: Mapping[str, Tensor], name: str = "labels") -> float:
    """A mean over labels that are not ignored."""
    return float((batch[name] != IGNORED).sum())


def next_labels(batch: Mapping[str, Tensor]) -> float:
    """The same where each token predicts the next one: the first of a row is never predicted."""
    return float((batch["labels"][:, 1:] != IGNORED).sum())


@dataclass(frozen=True)
class Family:
    """`build()` gives the model, `batch(rows, length, seed)` its data, `items(batch)` what the mean of its loss is over."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    items: Items = rows
    sizes: tuple[tuple[int, int], ...] = ((5, 12), (3, 9))
    """(rows, length): the size that is captured, and one or more others."""
    dtype: torch.dtype | None = None
    """Set where the model runs in one precision only."""


def noisy(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter a little, so that none is zero: a gradient that passes through zeros would show nothing."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=random).to(parameter.dtype), alpha=0.05)
    return model


def built(family: Family, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a family, the same each time."""
    torch.manual_seed(seed)
    model = noisy(family.build(), seed)
    for module in model.modules():
        if hasattr(given := getattr(module, "config", None), "use_cache"):
            given.use_cache = False  # as Hugging Face's Trainer has it
    return model.to(dtype) if dtype is not None else model


def cast(batch: Mapping[str, Tensor], dtype: torch.dtype) -> Batch:
    """A batch in a precision."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}


def text(
    rows: int, length: int, seed: int, *, vocabulary: int = VOCABULARY, padded: bool = True, left: bool = False, first: int = 4
) -> Batch:
    """Tokens with padding at one end of some rows, and labels of which some are ignored, more in some rows than in others."""
    random = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(first, vocabulary, (rows, length), generator=random)
    mask = torch.ones_like(tokens)
    for row in range(rows if padded else 0):
        count = row % 4
        mask[row, slice(0, count) if left else slice(length - count, length)] = 0
    tokens = tokens.masked_fill(mask == 0, 0)
    wanted = tokens.masked_fill(mask == 0, IGNORED)
    wanted[torch.rand(rows, length, generator=random) < 0.2] = IGNORED
    wanted[:, length // 2] = tokens[:, length // 2]  # no row is without a label
    return {"input_ids": tokens, "attention_mask": mask, "labels": wanted}


def only(batch: Batch, *names: str, **more: Any) -> Batch:
    """Some columns of a batch, and others."""
    return {name: batch[name] for name in names} | more
