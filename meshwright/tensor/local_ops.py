"""Local computations between collectives, for operations that torch offers only on whole tensors (losses, norms, lookups)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def product(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Returns x @ W^T for a weight (out, in); with `transposed`, x @ W for a weight (in, out)."""
    return torch.matmul(x, weight) if transposed else functional.linear(x, weight)


def lookup(table: Tensor, ids: Tensor, first: int, padding: int) -> Tensor:
    """Returns rows of a table shard that begins with row `first`, and zeros for rows that other ranks hold."""
    rows = table.shape[0]
    inside = (ids >= first) & (ids < first + rows)
    own = (ids - first).clamp(0, rows - 1)
    index = padding - first if first <= padding < first + rows else None
    return functional.embedding(own, table, index) * inside.unsqueeze(-1).to(table.dtype)


def known_scores(scores: Tensor, first: int, real: int) -> Tensor:
    """Returns the scores of this rank's classes, without the padding of the last shard."""
    return scores.narrow(1, 0, max(0, min(scores.shape[1], real - first)))


def _wide(scores: Tensor) -> Tensor:
    """Casts to at least float32, in which torch computes losses."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


def largest(scores: Tensor) -> Tensor:
    """Returns the largest score of every row, detached; minus infinity if the shard has no class."""
    scores = _wide(scores.detach())
    if not scores.shape[1]:
        return scores.new_full((scores.shape[0],), float("-inf"))
    return scores.amax(1)


def loss_parts(scores: Tensor, largest: Tensor, target: Tensor, first: int, ignored: int) -> Tensor:
    """Returns for each row this rank's share of the sum of exponentials, and the target's score if this rank has it."""
    shifted = _wide(scores) - largest.unsqueeze(1)
    here = (target >= first) & (target < first + scores.shape[1]) & (target != ignored)
    if not scores.shape[1]:
        picked = shifted.sum(1)
    else:
        own = (target - first).clamp(0, scores.shape[1] - 1)
        picked = torch.where(here, shifted.gather(1, own.unsqueeze(1)).squeeze(1), 0.0)
    return torch.stack((shifted.exp().sum(1), picked), 1)


def loss_sum(parts: Tensor, target: Tensor, ignored: int) -> Tensor:
    """Returns the sum of the losses of this rank's rows, and the number of rows that count."""
    counts = target != ignored
    losses = torch.where(counts, parts[:, 0].log() - parts[:, 1], 0.0)
    return torch.stack((losses.sum(), counts.sum().to(losses.dtype)))


def loss_of(sums: Tensor, mean: bool) -> Tensor:
    """Returns the mean loss from the sums over all rows."""
    return sums[0] / sums[1].detach() if mean else sums[0] + 0.0


def centred(x: Tensor, total: Tensor, width: int) -> Tensor:
    """Returns x minus the mean of its features."""
    return x - total / width


def normed(centred: Tensor, squares: Tensor, width: int, eps: float) -> Tensor:
    """Returns centred features divided by their standard deviation."""
    return centred * torch.rsqrt(squares / width + eps)


def causal(scores: Tensor) -> Tensor:
    """Hides the scores of keys that come after their query."""
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~seen, float("-inf"))


def hidden(scores: Tensor, mask: Tensor) -> Tensor:
    """Returns attention scores with a boolean mask applied."""
    return scores.masked_fill(~mask, float("-inf"))


def added(scores: Tensor, mask: Tensor) -> Tensor:
    """Returns attention scores with an additive mask applied."""
    return scores + mask


def loss_or_zero(sums: Tensor, mean: bool) -> Tensor:
    """Returns the mean loss from the sums over the rows of a half; 0 if no row counts."""
    return sums[0] / sums[1].detach().clamp(min=1) if mean else sums[0] + 0.0
