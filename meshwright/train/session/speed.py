"""The speed of training: rows, tokens and seconds of the steps, and floating-point operations of the model.

The time of a step includes the wait for its data. It does not include logging, evaluation and checkpoints.
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
"""The column with the tokens of a row."""


class Amount(NamedTuple):
    """The number of rows of a batch, and of tokens if a column has token ids. Padding counts, because it is computed."""

    rows: int = 0
    tokens: int = 0


def amount(batch: Given) -> Amount:
    """Counts the rows and tokens of the tensors of a batch."""
    named = isinstance(batch, Mapping)
    first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    ids = batch.get(TOKENS, first) if named and isinstance(batch, Mapping) else first
    return Amount(int(first.shape[0]), ids.numel() if _has_ids(ids) else 0)


def _has_ids(column: Tensor) -> bool:
    return column.dim() == 2 and not column.is_floating_point() and not column.is_complex()


@dataclass
class Speed:
    """Measures the speed of a training loop. `row_flops` and `token_flops` are the operations of a step per row and per token."""

    row_flops: float = 0.0
    token_flops: float = 0.0
    rows: int = 0
    tokens: int = 0
    steps: array[float] = field(default_factory=lambda: array("d"))
    _since: tuple[int, int, int] = (0, 0, 0)
    _begun: float = field(default_factory=monotonic)

    def go(self) -> None:
        """Starts the time of the next step."""
        self._begun = monotonic()

    @property
    def elapsed_s(self) -> float:
        """The time since `go`."""
        return monotonic() - self._begun

    def add(self, rows: int, tokens: int, seconds: float) -> float:
        """Adds a step that took this many seconds, and returns the number of its operations."""
        self.steps.append(seconds)
        self.rows += rows
        self.tokens += tokens
        return self.token_flops * tokens if self.token_flops and tokens else self.row_flops * rows

    def drain(self) -> dict[str, float]:
        """Returns the tokens per second since the last log, or the rows per second if the model has no tokens."""
        steps, rows, tokens = self._since
        self._since = len(self.steps), self.rows, self.tokens
        seconds = sum(self.steps[steps:])
        name, number = ("tokens", self.tokens - tokens) if self.tokens else ("samples", self.rows - rows)
        return {f"{name}_per_second": round(number / seconds, 3)} if seconds > 0 else {}

    @property
    def step_s(self) -> float:
        """The median time of a step, in seconds."""
        return median(self.steps) if self.steps else 0.0
