"""Checks whether the loss of a batch is the mean, or the sum, of the losses of its microbatches.

The loss of a whole example is compared with the combined loss of its microbatches, for three uneven cuts. The losses are
combined as the engine does it. A mean over rows or labels agrees, and so does a sum that is declared as one. Other losses
(RMSE, perplexity, contrastive losses, masked means, batch norm) depend on the number of microbatches, as they do under gradient
accumulation in any framework. A mean over unmasked positions differs only if rows have different lengths. So the comparison
is repeated with masks that are cut to different lengths, and with labels of which some are ignored (-100).
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
"""The row numbers at which the example is cut. Every part has at least two rows, which batch norm needs."""

NORMS = ("aten.batch_norm",)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}
"""The largest relative error that counts as equal. It is 1e-2 for other dtypes."""


@dataclass(frozen=True)
class WholeLoss:
    """The loss of a whole example, and the mean and the sum of its microbatches' losses, each from the cut that is most wrong."""

    whole: float
    mean: float
    sum: float
    tolerance: float
    padded: str = ""
    """The mask or label column that was cut to different lengths."""

    @property
    def kind(self) -> LossKind | None:
        """Whether the loss is a mean or a sum; None if it is neither."""
        close = {
            kind: abs(found - self.whole) <= self.tolerance * max(abs(self.whole), 1e-6) for kind, found in self._found.items()
        }
        return next((kind for kind, is_close in close.items() if is_close), None)

    @property
    def _found(self) -> dict[LossKind, float]:
        return {LossKind.MEAN: self.mean, LossKind.SUM: self.sum}

    def warning(self, declared: LossKind) -> str | None:
        """Returns a warning if the loss is not of the declared kind, else None."""
        found = self.kind
        if found is declared:
            return None
        where = f" that {self.padded!r} cuts to different lengths" if self.padded else ""
        text = (
            f"the loss of a batch of {ROWS} rows{where} is {self.whole:.6g}, but the {declared} of its microbatches' losses is "
            f"{self._found[declared]:.6g}: training depends on the number of microbatches, as under gradient accumulation"
        )
        if found is not None:
            return (
                f"{text}. The loss is a {found}: loss_kind={found.value!r} in TrainingArguments, parallelize or verify is exact"
            )
        return (
            f"{text}. It is not a mean over rows or labels, nor a sum: use compute_loss_func with such a mean, or one microbatch"
        )


def whole_loss(
    model: nn.Module, columns: Columns, flat: Flat, example: Given, objective: Objective, *, training: bool
) -> WholeLoss | None:
    """Compares the losses. Returns None if the model returns no loss for this example, or fails on it.

    The example is compared unchanged. If that agrees, it is compared with shortened masks, and then with shortened labels.
    """
    batch = Batch(example, microbatches=1, names=flat.columns)
    given = dict(batch.columns)
    target = next((name for name in (*TARGETS, "target of the loss") if name not in given), "")
    if batch.target is not None:
        given[target] = batch.target
    for tokens in (TOKENS, None):
        part = shortened(given, ROWS, tokens)
        found = _compared(model, columns, part, target, objective, training)
        if found is not None:
            if found.kind is not objective.kind:
                return found
            again = (
                _compared(model, columns, short, target, objective, training, name)
                for name, short in _shortened_examples(part, target)
            )
            return next((other for other in again if other is not None and other.kind is not objective.kind), found)
    return None


def _shortened_examples(part: Mapping[str, Tensor], target: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields the example with shortened masks, then with shortened labels, each with the name of one shortened column."""
    labels = (*TARGETS, target)
    masks = [name for name, t in part.items() if name not in labels and _is_mask(t)]
    if masks:
        yield masks[0], {name: _cut_short(t) if name in masks else t for name, t in part.items()}
    counted = [name for name, t in part.items() if name in labels and _is_counted(t)]
    if counted:
        # A model that shifts its labels does not count the first one, so every row keeps at least two.
        yield counted[0], {name: _cut_short(t, IGNORED, 2) if name in counted else t for name, t in part.items()}


def _is_counted(column: Tensor) -> bool:
    """Returns whether these are labels of positions, and none of them is ignored."""
    is_signed = column.dtype in (torch.int16, torch.int32, torch.int64)
    return is_signed and column.dim() == 2 and column.shape[1] > 2 and not bool((column == IGNORED).any())


def _is_mask(column: Tensor) -> bool:
    """Returns whether the column has only ones, so that it may be a mask that hides nothing."""
    return column.dim() > 1 and column.shape[1] > 2 and bool((column == 1).all())


def _cut_short(column: Tensor, rest: int = 0, least: int = 1) -> Tensor:
    """Cuts rows to different lengths of at least `least` positions. The positions after the end get the value `rest`."""
    length = column.shape[1]
    lengths = torch.tensor([max(least, length - row * length // ROWS) for row in range(ROWS)], device=column.device)
    keep = torch.arange(length, device=column.device) < lengths[:, None]
    return torch.where(keep.reshape(*keep.shape, *[1] * (column.dim() - 2)), column, torch.full_like(column, rest))


def _compared(
    model: nn.Module,
    columns: Columns,
    given: Mapping[str, Tensor],
    target: str,
    objective: Objective,
    training: bool,
    padded: str = "",
) -> WholeLoss | None:
    """Compares one example and leaves the model unchanged. Returns None if the model fails on this example."""
    with untouched(model, ()), weights_kept(model), torch.no_grad(), nullcontext() if training else Alike():
        model.train(training)
        try:
            found = _whole_and_parts(model, columns, given, target, objective)
        except Exception:
            return None
    return replace(found, padded=padded) if found is not None and isfinite(found.whole) else None


def _whole_and_parts(
    model: nn.Module, columns: Columns, given: Mapping[str, Tensor], target: str, objective: Objective
) -> WholeLoss | None:
    """Computes the loss of the whole example, and of the parts of all cuts."""
    kept = [(b, b.detach().clone()) for b in model.buffers()]
    dtype = torch.float32

    def loss(start: int, stop: int) -> tuple[float, float] | None:
        """Returns the loss of some rows, and the number of items that a mean would be over."""
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
            return None  # the default loss of an output and its target is always a mean
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
    return WholeLoss(whole[0], furthest[0], furthest[1], TOLERANCE.get(dtype, 1e-2))


def batch_norms(flat: Flat) -> list[str]:
    """Returns the modules that normalize over the rows of a microbatch in train mode."""
    return [node.path for node in flat.nodes if is_one_of(node.target, NORMS) and len(node.args) > 5 and node.args[5] is True]
