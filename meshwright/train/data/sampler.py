"""Selects the rows of each step, in the order of the Hugging Face Trainer in one process.

An epoch is one permutation, drawn from seed + epoch. A step takes the next rows of it, and each data-parallel copy takes its
share of them. Everything follows from (seed, epoch, step), so a run can resume without drawing the earlier steps again.
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
    """The rows of every step of a data set with `size` rows."""

    size: int
    rows: StepRows
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not self.batches:
            dropped = f" and dataloader_drop_last drops a batch below {self.rows.batch}" if self.drop_last else ""
            raise MeshwrightError(f"the data set has {self.size} rows{dropped}: no rows are left")

    @property
    def batches(self) -> int:
        """The number of batches per epoch of a serial data loader."""
        return self.size // self.rows.batch if self.drop_last else ceil(self.size / self.rows.batch)

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch; the last one may have fewer rows."""
        return ceil(self.batches / self.rows.accumulation)

    def progress(self, step: int) -> float:
        """Return the fraction of the epoch that is done after this step."""
        return min((step + 1) * self.rows.accumulation, self.batches) / self.batches

    def order(self, epoch: int) -> list[int]:
        """Return the row numbers of an epoch, in order."""
        if not self.shuffle:
            return list(range(self.size))
        random = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.size, generator=random).tolist()

    def span(self, step: int) -> Rows:
        """Return the range of a step's rows in the order of the epoch."""
        end = min(self.size, self.batches * self.rows.batch)
        return Rows(min(step * self.rows.step, end), min((step + 1) * self.rows.step, end))


def share(rows: list[int], copy: int, copies: int) -> list[int]:
    """Return the rows of a step that one data-parallel copy takes."""
    start, stop = Rows(0, len(rows)).cut(copy, copies)
    return rows[start:stop]
