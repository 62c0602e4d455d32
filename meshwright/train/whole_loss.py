"""Is a loss the mean, or the sum, that microbatches are added up as?

The loss of a whole example is compared with that of its microbatches, put together as the engine does it, for three uneven
cuts. A mean over rows or labels agrees, and so does a sum if it is declared as one. Other losses (RMSE, perplexity, contrastive
losses, masked means, batch norm) change with the number of microbatches, as they do under gradient accumulation anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor, nn

from meshwright.capture.arguments import Columns
from meshwright.capture.check.sizes import TOKENS, shortened
from meshwright.capture.check.streams import seed_all
from meshwright.capture.check.untouched import put_back, untouched
from meshwright.capture.export import results
from meshwright.capture.flat import Flat
from meshwright.capture.operations import is_one_of
from meshwright.ir.columns import TARGETS
from meshwright.ir.placement import Rows
from meshwright.runtime.batch import Batch, Given, Objective
from meshwright.runtime.loss_kind import LossKind

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
        told = (
            f"the loss of a batch of {ROWS} rows is {self.whole:.6g}, and {self._found[declared]:.6g} from its microbatches "
            f"as a {declared}: training depends on the number of microbatches, as under gradient accumulation"
        )
        if found is not None:
            return (
                f"{told}. The loss is a {found}: loss_kind={found.value!r} in TrainingArguments, parallelize or verify is exact"
            )
        return f"{told}. It is no mean over rows or labels, and no sum: compute_loss_func with such a mean, or one microbatch"


def whole_loss(
    model: nn.Module, columns: Columns, flat: Flat, example: Given, objective: Objective, *, training: bool
) -> WholeLoss | None:
    """Compare; None if the model has no loss of its own for this example, or fails on it."""
    batch = Batch(example, microbatches=1, names=flat.columns)
    given = dict(batch.columns)
    target = next((name for name in (*TARGETS, "target of the loss") if name not in given), "")
    if batch.target is not None:
        given[target] = batch.target
    for tokens in (TOKENS, None):
        part = shortened(given, ROWS, tokens)
        with untouched(model, ()), torch.no_grad():
            model.train(training)
            try:
                found = _put_together(model, columns, part, target, objective)
            except Exception:  # a size that the model itself refuses says nothing about its loss
                continue
        if found is not None and isfinite(found.whole):
            return found
    return None


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
