"""Which rows each step takes, in the order of the Hugging Face Trainer in one process.

An epoch is one permutation, drawn from seed + epoch; a step takes the next rows of it, and a copy its share of them. All of
it follows from (seed, epoch, step), so a run goes on where it stopped without having drawn what lies before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Rows
from meshwright.train.data.step_rows import StepRows


@dataclass(frozen=True)
class Sampler:
    """The rows of every step of a data set of `size` rows."""

    size: int
    rows: StepRows
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not self.batches:
            dropped = f" and dataloader_drop_last drops a batch below {self.rows.batch}" if self.drop_last else ""
            raise MeshwrightError(f"the data set has {self.size} rows{dropped}: nothing is left of it")

    @property
    def batches(self) -> int:
        """How many batches a serial loader would give in an epoch."""
        return self.size // self.rows.batch if self.drop_last else ceil(self.size / self.rows.batch)

    @property
    def steps(self) -> int:
        """Updates per epoch; the last one may be short."""
        return ceil(self.batches / self.rows.accumulation)

    def progress(self, step: int) -> float:
        """Which part of the epoch is done after this step of it."""
        return min((step + 1) * self.rows.accumulation, self.batches) / self.batches

    def order(self, epoch: int) -> list[int]:
        """The rows of an epoch, in order."""
        if not self.shuffle:
            return list(range(self.size))
        random = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.size, generator=random).tolist()

    def span(self, step: int) -> Rows:
        """Where in the epoch's order the rows of a step lie."""
        end = min(self.size, self.batches * self.rows.batch)
        return Rows(min(step * self.rows.step, end), min((step + 1) * self.rows.step, end))


def share(rows: list[int], copy: int, copies: int) -> list[int]:
    """What one copy takes of a step's rows."""
    start, stop = Rows(0, len(rows)).cut(copy, copies)
    return rows[start:stop]
