"""The tensors of a step, cut by rows: into microbatches, and further for halves and teams.

A batch is a tuple whose last tensor is the target, or a mapping in which the target has one of its usual names; what is
left goes to the first stage. A captured model takes columns by name on any stage: `names` says which, and a tuple is named
in that order; a column that a rank does not read may be on the meta device, where it has a shape and no memory.
Microbatch i of copy j is cut number j N + i of N dp cuts; a short batch gives short cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.ir.placement import Rows
from meshwright.runtime.device import stream
from meshwright.runtime.stage.given_batch import Given as Given
from meshwright.runtime.stage.given_batch import name_columns, sort_out
from meshwright.runtime.stage.objective import LossKind, LossWeight, Objective


@dataclass(frozen=True)
class Own:
    """The rows of one copy alone, where each copy loads its own."""

    tensors: Given


class Cut(NamedTuple):
    """Some rows of a batch: what the mean of their loss is over, what they count for in the whole batch, and where the random
    streams of their layers start."""

    rows: Rows
    items: float
    counts: float
    stream: int
    graph: int = 0
    """Which of a captured model's graphs is for so many rows; 0 is the first."""


class Batch:
    """One step's tensors on one copy."""

    def __init__(
        self,
        given: Given | Own,
        *,
        microbatches: int,
        copy: int = 0,
        copies: int = 1,
        device: torch.device | None = None,
        names: tuple[str, ...] | None = None,
    ) -> None:
        alone, tensors = isinstance(given, Own), given.tensors if isinstance(given, Own) else given
        args, kwargs, target, columns = (*sort_out(tensors), {}) if names is None else name_columns(tensors, names)
        every = (*args, *kwargs.values(), *columns.values(), *([] if target is None else [target]))
        sizes = {t.shape[0] if t.dim() else 0 for t in every}
        if len(sizes) != 1:
            raise MeshwrightError(f"the tensors of a batch have different numbers of rows: {sorted(sizes)}")
        self.size = sizes.pop()
        self.microbatches, self.copy, self.copies = microbatches, copy, copies
        whole = Rows(0, self.size)
        cuts, first = (microbatches, 0) if alone else (copies * microbatches, copy * microbatches)
        self.cuts = list(_cuts(whole, first, microbatches, cuts))
        """The rows of each microbatch of this copy, among those that are here."""
        self.first = copy * microbatches
        """The number of the first of them in the whole batch."""
        self.ready: list[Cut] = []
        """The microbatches, once they are weighed."""
        self.args = tuple(t.to(device) for t in args)
        self.kwargs = {name: t.to(device) for name, t in kwargs.items()}
        self.target = None if target is None else target.to(device)
        self.labelled = target is not None and not target.is_floating_point()
        self.columns = {name: t if t.is_meta else t.to(device) for name, t in columns.items()}
        shaped = (*self.args, *self.kwargs.values(), *self.columns.values())
        self.form = ((self.size, cuts), *((tuple(t.shape[1:]), t.dtype) for t in shaped))
        """What the shapes of everything that follows depend on; equal on all ranks."""
        self.graph_for: Callable[[int], int] = _first_graph
        """The graph for a number of rows."""

    @property
    def count(self) -> int:
        """How many losses the whole batch adds up at most: labels, or rows where there are none."""
        labels = [t for t in (self.target, *(self.columns.get(name) for name in TARGETS)) if t is not None]
        return max((t.numel() for t in labels if not t.is_floating_point()), default=self.size)

    def inputs(self, rows: Rows) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the first stage is called with."""
        start, stop = rows
        named = {name: t[start:stop] for name, t in self.kwargs.items()} if self.kwargs else {}
        return tuple([t[start:stop] for t in self.args]), named

    def named(self, names: Iterable[str], rows: Rows) -> dict[str, Tensor]:
        """Columns by name, cut to some rows."""
        return {name: self.columns[name][rows.start : rows.stop] for name in names}

    def targets(self, rows: Rows) -> Tensor | None:
        """What the loss compares with."""
        return None if self.target is None else self.target[rows.start : rows.stop]

    def make_ready(self, objective: Objective, seed: int, step: int) -> list[Cut]:
        """The microbatches of the batch of a step; asked for by every stage and worked out once."""
        start = stream(seed, step)
        if self.target is not None and self.labelled and objective.by_labels:
            # One question for all rows: each answer is waited for.
            upto = [0, *objective.labels(self.target).cumsum(0).tolist()]
            weights = [LossWeight(*[float(upto[rows.stop] - upto[rows.start])] * 2) for rows in self.cuts]
        else:
            weights = [self.weight(rows, objective) for rows in self.cuts]
        self.ready = [
            Cut(rows, items, counts, stream(start, self.first + mb), self.graph_for(rows.stop - rows.start))
            for mb, (rows, (items, counts)) in enumerate(zip(self.cuts, weights, strict=True))
        ]
        return self.ready

    def cut(self, mb: int, rows: Rows, objective: Objective, start: int) -> Cut:
        """Some rows of a microbatch; `start` is where the random streams of the step do."""
        return Cut(rows, *self.weight(rows, objective), stream(start, self.first + mb), self.graph_for(rows.stop - rows.start))

    def weight(self, rows: Rows, objective: Objective) -> LossWeight:
        """What some rows count."""
        if rows.start == rows.stop:  # nobody runs them, and what weighs may not take them
            return LossWeight(0.0, 0.0)
        if objective.kind is LossKind.SUM:  # sums are added up as they are: the last row of all is what they are divided by
            return LossWeight(1.0, float(rows.stop == self.size and self.copy == self.copies - 1))
        columns = self.named(objective.columns, rows) if objective.weigh is not None else None
        return objective.weight(self.targets(rows) if self.labelled else None, rows, columns)


@lru_cache(maxsize=64)
def _cuts(rows: Rows, first: int, count: int, cuts: int) -> tuple[Rows, ...]:
    """Some of equal cuts of rows."""
    return tuple(rows.cut(index, cuts) for index in range(first, first + count))


def _first_graph(rows: int) -> int:
    return 0


class Batches(dict[int, Batch]):
    """The batches of a walk by step, each made when it is first asked for; what is further `behind` than that is let go."""

    def __init__(self, make: Callable[[int], Batch], behind: int) -> None:
        super().__init__()
        self._make, self._behind = make, behind

    def __missing__(self, step: int) -> Batch:
        for old in [s for s in self if s < step - self._behind]:
            del self[old]
        found = self[step] = self._make(step)
        return found
