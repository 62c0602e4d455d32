"""How fast training goes: rows and tokens of the steps, their seconds, and the operations of the model.

Counted is what steps take, the wait for their data included; logging, evaluation and checkpoints are not.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import NamedTuple

from torch import Tensor

from meshwright.runtime.stage.batch import Given

TOKENS = "input_ids"
"""The column that has the tokens of a row."""


class Amount(NamedTuple):
    """Rows of a batch, and tokens where its first column has ids; padding counts, since it is computed."""

    rows: int = 0
    tokens: int = 0


def amount(batch: Given) -> Amount:
    """The rows and tokens of some tensors of a batch."""
    named = isinstance(batch, Mapping)
    first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    ids = batch.get(TOKENS, first) if named and isinstance(batch, Mapping) else first
    return Amount(int(first.shape[0]), ids.numel() if _has_ids(ids) else 0)


def _has_ids(column: Tensor) -> bool:
    return column.dim() == 2 and not column.is_floating_point() and not column.is_complex()


@dataclass
class Speed:
    """The clock of a training loop. `row_flops` and `token_flops` are the operations of a step on one row, or on one token."""

    row_flops: float = 0.0
    token_flops: float = 0.0
    rows: int = 0
    tokens: int = 0
    steps: array[float] = field(default_factory=lambda: array("d"))
    _since: tuple[int, int, int] = (0, 0, 0)
    _begun: float = field(default_factory=monotonic)

    def go(self) -> None:
        """What comes from here on belongs to the next step."""
        self._begun = monotonic()

    def add(self, rows: int, tokens: int) -> float:
        """A step has ended; its operations."""
        self.steps.append(monotonic() - self._begun)
        self.rows += rows
        self.tokens += tokens
        return self.token_flops * tokens if self.token_flops and tokens else self.row_flops * rows

    def drain(self) -> dict[str, float]:
        """Tokens per second since the last log, or rows of models without tokens."""
        steps, rows, tokens = self._since
        self._since = len(self.steps), self.rows, self.tokens
        seconds = sum(self.steps[steps:])
        name, number = ("tokens", self.tokens - tokens) if self.tokens else ("samples", self.rows - rows)
        return {f"{name}_per_second": round(number / seconds, 3)} if seconds > 0 else {}

    @property
    def step_s(self) -> float:
        """What a step takes: the median."""
        return median(self.steps) if self.steps else 0.0
