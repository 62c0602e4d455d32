"""How the losses of microbatches become the loss of a step: one rule for rows, tokens, data-parallel copies and accumulation.

    microbatch    its loss          items    sum = loss x items    counts
    rows 0 to 1   2.0  (a mean)         3      6.0                   3
    rows 2 to 3   1.0                   4      4.0                   4
    rows 4 to 5   (all ignored)         0      0.0                   0
                                            -------                ----
                                              10.0        /          7     = loss of the step

A microbatch has two weights. `items` is the number of rows or labels that its own loss is the mean over, so loss x items is
a sum. `counts` is what it adds to the divisor. They differ if the user counts in another way than the model's loss
(`num_items_in_batch`), and for losses that are sums themselves (`LossKind.SUM`): each has items 1, and only the microbatch
with the last row of the last data-parallel copy counts 1, so that the divisor is 1.

Sums and counts are added over microbatches, accumulation steps, replicas and data-parallel copies, and divided once. The loss
for the log is divided where it is logged (`Tally`). The gradient is divided in `unit.py`, where counts are sent at the end of the
gradient's buffer. So every plan gives the mean over the whole batch. `batch.py` cuts the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.ir.placement import Rows


class LossKind(StrEnum):
    """How the losses of microbatches become the loss of their batch."""

    MEAN = "mean"  # each is weighted by its rows or labels; their sum is divided once
    SUM = "sum"  # they are added

    @classmethod
    def of(cls, given: Any) -> LossKind:
        """Returns the kind with this name."""
        try:
            return cls(given)
        except ValueError:
            raise MeshwrightError(f"a loss must be a mean or a sum, got loss_kind={given!r}", fix='loss_kind="sum"') from None


Loss = Callable[[Tensor, Tensor], Tensor]
"""A user's loss function: takes output and target of some rows and returns their mean loss."""


class Weigh(Protocol):
    """Computes the weight of the loss of some rows from their columns."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        ...

    def __call__(self, columns: Mapping[str, Tensor]) -> float:
        """Returns the weight."""
        ...


class LossWeight(NamedTuple):
    """The number of items that the loss of some rows is the mean over, and their count in the mean of the whole batch."""

    items: float
    counts: float


Count = Callable[[Tensor], float]
"""Returns how many items some labels count for, if the user counts in another way than the model's loss."""


IGNORED = -100
"""The label that torch ignores."""


@dataclass(eq=False)
class Objective:
    """The sum of the losses of some rows, and the weight to divide it by: rows, or tokens that count.

    Sums and weights are added over the whole batch and divided once, so that any plan gives the same mean. Losses that are sums
    themselves (`kind`) are divided by 1. If no loss is `wanted`, only outputs, every weight is 0.
    """

    loss: Loss | None = None
    _: KW_ONLY
    wanted: bool = True
    weigh: Weigh | None = None
    count: Count | None = None
    kind: LossKind = LossKind.MEAN

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that weights are computed from."""
        return () if self.weigh is None else self.weigh.columns

    def weight(self, target: Tensor | None, rows: Rows, columns: Mapping[str, Tensor] | None = None) -> LossWeight:
        """Returns the weight of the loss of these rows: labels that are not ignored, or rows if the targets are not labels."""
        if not self.wanted:
            return LossWeight(0.0, 0.0)
        if self.weigh is not None and columns is not None:
            items = self.weigh(columns)
            labels = [columns[name] for name in TARGETS if name in columns]
            return LossWeight(items, self.count(labels[0]) if self.count is not None and labels else items)
        if target is not None and not target.is_floating_point():
            items = float(self.labels(target).sum()) if self.count is None else self.count(target)
            return LossWeight(items, items)
        size = float(rows.stop - rows.start)
        return LossWeight(size, size)

    @property
    def by_labels(self) -> bool:
        """True if a weight is the number of labels that count, for targets that are labels."""
        return self.wanted and self.weigh is None and self.count is None and self.kind is LossKind.MEAN

    def labels(self, target: Tensor) -> Tensor:
        """Returns how many labels of each row are not ignored.

        An unsigned dtype cannot hold -100, but torch would compare with the value that -100 wraps to. So all its labels count.
        """
        rows = target.flatten(1) if target.dim() > 1 else target.unsqueeze(1)
        counted = rows != IGNORED if target.dtype.is_signed else torch.ones_like(rows, dtype=torch.bool)
        return counted.sum(1)

    def __call__(self, output: Tensor, target: Tensor | None, count: float) -> Tensor:
        """Returns the sum of the losses of some rows."""
        loss, times = self.mean(output, target, count)
        return loss if times == 1.0 else loss * times

    def mean(self, output: Tensor, target: Tensor | None, count: float) -> tuple[Tensor, float]:
        """Returns a loss and the factor that turns it into the sum.

        If nothing counts, the loss is 0, because a mean over nothing would be NaN.
        """
        if not count:
            return torch.zeros((), dtype=torch.float32, device=output.device), 1.0
        if output.dtype in (torch.bfloat16, torch.float16):
            output = output.float()  # a sum over rows would overflow them
        if self.loss is not None:
            if target is None:
                raise MeshwrightError(
                    "a loss function needs a target, but the batch has none", fix="batch(step) -> (inputs, target)"
                )
            return _one_number(self.loss(output, target)), count
        if output.dim() == 0:
            return output, count
        if target is None:
            raise MeshwrightError(
                f"the first output of the last stage has the shape {tuple(output.shape)} and is not a loss, and the batch has no "
                "target to compare it with",
                fix="return the loss first (loss, logits), or use batch(step) -> (inputs, target)",
            )
        if self.kind is LossKind.SUM:
            raise MeshwrightError(
                'loss_kind="sum" needs a loss: the default loss is a mean', fix="use a model that returns its loss"
            )
        _refuse_shapes(output, target)
        if not target.is_floating_point():
            classes, labels = output.reshape(-1, output.shape[-1]), target.reshape(-1).long()
            return torch.nn.functional.cross_entropy(classes, labels, ignore_index=IGNORED, reduction="sum"), 1.0
        return torch.nn.functional.mse_loss(output, target.to(output.dtype)), count


def _one_number(loss: Tensor) -> Tensor:
    """Returns the result of a user's loss function as a tensor without dimensions."""
    if not isinstance(loss, Tensor):
        raise MeshwrightError(
            f"the loss function returned {type(loss).__name__}, not a tensor", fix="return the mean over the rows"
        )
    if not loss.dim():
        return loss
    if loss.numel() != 1:
        raise MeshwrightError(
            f"the loss function returned {tuple(loss.shape)}, not one number", fix="return the mean over the rows"
        )
    return loss.reshape(())


def _refuse_shapes(output: Tensor, target: Tensor) -> None:
    """Raises if the default loss cannot compare output and target.

    torch would broadcast (N, 1) and (N,) to N x N pairs of rows.
    """
    got, wanted = tuple(output.shape), tuple(target.shape)
    if target.is_floating_point():
        if got != wanted:
            raise MeshwrightError(
                f"the model's output is {got} and its target {wanted}: the mean squared error would pair every row with all rows",
                fix="use targets of the output's shape (target.view_as(output)), or your own loss function",
            )
    elif output[..., 0].numel() != target.numel():
        raise MeshwrightError(
            f"the model's output is {got} and its labels {wanted}: the default loss, a cross entropy, expects classes in the "
            "last dimension",
            fix=f"use labels of shape {got[:-1]}, or your own loss function",
        )


@dataclass
class Tally:
    """Losses, the factor of each in their sum, and the weight of the sum."""

    losses: list[Tensor] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    weight: float = 0.0

    @property
    def loss(self) -> Tensor | float:
        """The sum of all losses."""
        terms = [(loss * times).double() for loss, times in zip(self.losses, self.times, strict=True)]
        return torch.stack(terms).sum() if terms else 0.0

    def add(self, loss: Tensor, times: float, weight: float) -> None:
        """Adds the loss of some rows. `times` is its factor in the sum."""
        self.losses.append(loss)
        self.times.append(times)
        self.weight += weight
