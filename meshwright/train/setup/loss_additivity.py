"""Is a loss the mean, or the sum, that microbatches are added up as?

The loss of a whole example is compared with that of its microbatches, put together as the engine does it, for three uneven
cuts. A mean over rows or labels agrees, and so does a sum if it is declared as one. Other losses (RMSE, perplexity, contrastive
losses, masked means, batch norm) change with the number of microbatches, as they do under gradient accumulation anywhere.
A mean over what a mask lets through shows only where rows have different lengths: a mask of ones is cut short for a second look,
and so are labels of which none is ignored (-100), for a mean over labels that forward counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor, nn

from meshwright.capture.check.example_sizes import IGNORED, TOKENS, shortened
from meshwright.capture.check.random_streams import Alike, seed_all
from meshwright.capture.check.restore_model import put_back, untouched
from meshwright.capture.check.restore_weights import weights_kept
from meshwright.capture.trace.batch_columns import Columns
from meshwright.capture.trace.export import results
from meshwright.capture.trace.graph import Flat
from meshwright.capture.trace.operations import is_one_of
from meshwright.ir.column_names import TARGETS
from meshwright.ir.placement import Rows
from meshwright.runtime.stage.batch import Batch, Given
from meshwright.runtime.stage.objective import LossKind, Objective

ROWS = 7
CUTS = ((0, 2, ROWS), (0, 3, ROWS), (0, 3, 5, ROWS))
"""Where the example is cut; every part has at least two rows, which batch norm needs."""

NORMS = ("aten.batch_norm",)
BAR = {torch.float64: 1e-9, torch.float32: 3e-5}
"""The largest relative distance that counts as equal; 1e-2 for other dtypes."""


@dataclass(frozen=True)
class WholeLoss:
    """The loss of a whole example, and the furthest of what its microbatches give as a mean and as a sum."""

    whole: float
    mean: float
    sum: float
    bar: float
    padded: str = ""
    """The column, of ones or of labels, that was cut short."""

    @property
    def kind(self) -> LossKind | None:
        """What the loss is; None if it is neither."""
        close = {kind: abs(found - self.whole) <= self.bar * max(abs(self.whole), 1e-6) for kind, found in self._found.items()}
        return next((kind for kind, is_close in close.items() if is_close), None)

    @property
    def _found(self) -> dict[LossKind, float]:
        return {LossKind.MEAN: self.mean, LossKind.SUM: self.sum}

    def warning(self, declared: LossKind) -> str | None:
        """What to tell a user who has declared this kind; None if the loss is of it."""
        found = self.kind
        if found is declared:
            return None
        where = f" that {self.padded!r} cuts to different lengths" if self.padded else ""
        told = (
            f"the loss of a batch of {ROWS} rows{where} is {self.whole:.6g}, and {self._found[declared]:.6g} "
            f"from its microbatches as a {declared}: training depends on their number, as under gradient accumulation"
        )
        if found is not None:
            return (
                f"{told}. The loss is a {found}: loss_kind={found.value!r} in TrainingArguments, parallelize or verify is exact"
            )
        return f"{told}. It is no mean over rows or labels, and no sum: compute_loss_func with such a mean, or one microbatch"


def whole_loss(
    model: nn.Module, columns: Columns, flat: Flat, example: Given, objective: Objective, *, training: bool
) -> WholeLoss | None:
    """Compare; None if the model has no loss of its own for this example, or fails on it.

    The example as it is, and where that agrees, with its masks cut short, and then its labels.
    """
    batch = Batch(example, microbatches=1, names=flat.columns)
    given = dict(batch.columns)
    target = next((name for name in (*TARGETS, "target of the loss") if name not in given), "")
    if batch.target is not None:
        given[target] = batch.target
    for tokens in (TOKENS, None):
        part = shortened(given, ROWS, tokens)
        found = _tried(model, columns, part, target, objective, training)
        if found is not None:
            if found.kind is not objective.kind:
                return found
            again = (_tried(model, columns, short, target, objective, training, name) for name, short in _shorter(part, target))
            return next((other for other in again if other is not None and other.kind is not objective.kind), found)
    return None


def _shorter(part: Mapping[str, Tensor], target: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The example with all its masks of ones cut short, then with labels cut short; each with a column that shows it."""
    labels = (*TARGETS, target)
    masks = [name for name, t in part.items() if name not in labels and _is_mask(t)]
    if masks:
        yield masks[0], {name: _cut_short(t) if name in masks else t for name, t in part.items()}
    counted = [name for name, t in part.items() if name in labels and _is_counted(t)]
    if counted:
        # A model that shifts its labels does not count the first: two are left in every row.
        yield counted[0], {name: _cut_short(t, IGNORED, 2) if name in counted else t for name, t in part.items()}


def _is_counted(column: Tensor) -> bool:
    """Are these labels of places, none of which is ignored yet?"""
    is_signed = column.dtype in (torch.int16, torch.int32, torch.int64)
    return is_signed and column.dim() == 2 and column.shape[1] > 2 and not bool((column == IGNORED).any())


def _is_mask(column: Tensor) -> bool:
    """Is it ones all over, so that it may be a mask that hides nothing yet?"""
    return column.dim() > 1 and column.shape[1] > 2 and bool((column == 1).all())


def _cut_short(column: Tensor, rest: int = 0, least: int = 1) -> Tensor:
    """Rows that end at different places, each after at least `least`; `rest` stands after the end."""
    length = column.shape[1]
    lengths = torch.tensor([max(least, length - row * length // ROWS) for row in range(ROWS)], device=column.device)
    there = torch.arange(length, device=column.device) < lengths[:, None]
    return torch.where(there.reshape(*there.shape, *[1] * (column.dim() - 2)), column, torch.full_like(column, rest))


def _tried(
    model: nn.Module,
    columns: Columns,
    given: Mapping[str, Tensor],
    target: str,
    objective: Objective,
    training: bool,
    padded: str = "",
) -> WholeLoss | None:
    """The comparison; None if the model refuses this example, which says nothing about its loss."""
    with untouched(model, ()), weights_kept(model), torch.no_grad(), nullcontext() if training else Alike():
        model.train(training)
        try:
            found = _put_together(model, columns, given, target, objective)
        except Exception:
            return None
    return replace(found, padded=padded) if found is not None and isfinite(found.whole) else None


def _put_together(
    model: nn.Module, columns: Columns, given: Mapping[str, Tensor], target: str, objective: Objective
) -> WholeLoss | None:
    """The whole example, and all cuts of it."""
    kept = [(b, b.detach().clone()) for b in model.buffers()]
    dtype = torch.float32

    def loss(start: int, stop: int) -> tuple[float, float] | None:
        """The loss of some rows as it is, and how many items a mean would be over."""
        nonlocal dtype
        put_back(kept)
        seed_all(0)
        rows = {name: t[start:stop].clone() for name, t in given.items()}
        wanted = rows.pop(target, None)
        labels = None if wanted is None or wanted.is_floating_point() else wanted
        weighed = {name: rows[name] for name in objective.columns}
        items = objective.weight(labels, Rows(0, stop - start), weighed or None).items
        output = next(iter(results(columns.call(model, rows)).values()))
        if output.dim() and objective.loss is None:
            return None  # the usual loss of an output and its target is a mean by its own rule
        dtype = output.dtype
        value, _ = objective.mean(output, wanted, items or 1.0)
        return float(value), items

    whole = loss(0, ROWS)
    if whole is None:
        return None
    means, sums = [], []
    for cuts in CUTS:
        parts = [found for start, stop in pairwise(cuts) if (found := loss(start, stop)) is not None]
        total = sum(items for _, items in parts)
        means.append(sum(value * items for value, items in parts if items) / total if total else whole[0])
        sums.append(sum(value for value, _ in parts))
    furthest = [max(found, key=lambda value: abs(value - whole[0])) for found in (means, sums)]
    return WholeLoss(whole[0], furthest[0], furthest[1], BAR.get(dtype, 1e-2))


def batch_norms(flat: Flat) -> list[str]:
    """The modules that norm over the rows of a microbatch while they train."""
    return [node.path for node in flat.nodes if is_one_of(node.target, NORMS) and len(node.args) > 5 and node.args[5] is True]
