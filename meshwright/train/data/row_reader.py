"""How the rows of any data set of a run become tensors: one collator, one seed, and the columns that the model takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.train.data.batches import Source, without_unused
from meshwright.train.data.collate import Collate
from meshwright.train.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class RowReader:
    """Makes a `Source` of a data set. `processes` is the number of loader processes."""

    collate: Collate
    seed: int
    processes: int = 0
    vocabularies: tuple[Vocabulary, ...] = ()

    def source(self, dataset: Any) -> Source:
        """A data set, read by this reader; unused columns are not even loaded."""
        known = without_unused(dataset, self.collate.columns)
        return Source(known, self.collate, self.seed, processes=self.processes, vocabularies=self.vocabularies)
