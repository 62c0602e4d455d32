"""Turns the rows of any data set of a run into tensors, with one collator, one seed, and the columns that the model takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.train.data.batches import Source, without_unused
from meshwright.train.data.collate import Collate
from meshwright.train.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class RowReader:
    """Makes a `Source` from a data set. `processes` is the number of loader processes."""

    collate: Collate
    seed: int
    processes: int = 0
    vocabularies: tuple[Vocabulary, ...] = ()

    def source(self, dataset: Any) -> Source:
        """Return a source for a data set. Unused columns are never loaded."""
        known = without_unused(dataset, self.collate.columns)
        return Source(known, self.collate, self.seed, processes=self.processes, vocabularies=self.vocabularies)
