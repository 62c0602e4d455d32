"""The tensors of a step, cut by rows into microbatches, and further for halves and teams.

A batch is a tuple whose last tensor is the target, or a mapping in which the target has one of its usual names. The other
tensors go to the first stage. A captured model takes columns by name on any stage: `names` lists them, and the tensors of a
tuple get these names in order. A column that a rank does not read may be on the meta device: it has a shape but no memory.
Microbatch i of data-parallel copy j is cut number j N + i of N dp cuts. A short batch gives short cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


class Several(NamedTuple):
    """Some microbatches of a step, by their numbers in ascending order, and the rows of the whole step."""

    numbers: tuple[int, ...]
    step_rows: int


@dataclass(frozen=True)
class Own:
    """The rows of one data-parallel copy, if each copy loads its own rows."""

    tensors: Given
    microbatch: int | None = None
    """The only microbatch of the step that these rows are, if each worker runs one microbatch and loads only its rows."""
    several: Several | None = None
    """The microbatches of the step that these rows are, if a worker runs some of them and loads only their rows."""


class Cut(NamedTuple):
    """Some rows of a batch.

    `items` is the number of items that their loss is a mean over. `counts` is their weight in the whole batch. `stream` is the
    seed of the random streams of their layers.
    """

    rows: Rows
    items: float
    counts: float
    stream: int
    graph: int = 0
    """The index of the captured graph for this number of rows; 0 is the first."""


class Batch:
    """The tensors of one step on one data-parallel copy."""

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
        self.only = given.microbatch if isinstance(given, Own) else None
        several = given.several if isinstance(given, Own) else None
        if several is not None:
            self.only = several.numbers[-1]
            self.cuts = list(_some_cuts(several, microbatches))
        elif self.only is not None:
            self.cuts = list(_one_cut(whole, self.only, microbatches))
        else:
            self.cuts = list(_cuts(whole, first, microbatches, cuts))
        """The rows of each microbatch of this data-parallel copy, as indices into the tensors of this rank."""
        self.first = copy * microbatches
        """The index of the first of these microbatches in the whole batch."""
        self.ready: list[Cut] = []
        """The microbatches with their weights; empty before `make_ready`."""
        self.args = tuple(t.to(device) for t in args)
        self.kwargs = {name: t.to(device) for name, t in kwargs.items()}
        self.target = None if target is None else target.to(device)
        self.labelled = target is not None and not target.is_floating_point()
        self.columns = {name: t if t.is_meta else t.to(device) for name, t in columns.items()}
        shaped = (*self.args, *self.kwargs.values(), *self.columns.values())
        self.form = ((self.size, cuts, several), *((tuple(t.shape[1:]), t.dtype) for t in shaped))
        """Determines all later shapes; equal on all ranks."""
        self.graph_for: Callable[[int], int] = _first_graph
        """Returns the index of the captured graph for a number of rows."""

    @property
    def count(self) -> int:
        """The maximum number of losses that the whole batch sums: its labels, or its rows if it has no labels."""
        labels = [t for t in (self.target, *(self.columns.get(name) for name in TARGETS)) if t is not None]
        return max((t.numel() for t in labels if not t.is_floating_point()), default=self.size)

    def inputs(self, rows: Rows) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Returns the arguments of the first stage."""
        start, stop = rows
        named = {name: t[start:stop] for name, t in self.kwargs.items()} if self.kwargs else {}
        return tuple([t[start:stop] for t in self.args]), named

    def named(self, names: Iterable[str], rows: Rows) -> dict[str, Tensor]:
        """Returns columns by name, cut to some rows."""
        return {name: self.columns[name][rows.start : rows.stop] for name in names}

    def targets(self, rows: Rows) -> Tensor | None:
        """Returns the targets of some rows."""
        return None if self.target is None else self.target[rows.start : rows.stop]

    def make_ready(self, objective: Objective, seed: int, step: int) -> list[Cut]:
        """Returns the microbatches of a step. Every stage calls this; it is computed once."""
        start = stream(seed, step)
        if self.target is not None and self.labelled and objective.by_labels:
            # One transfer for all rows, because each one waits for the device.
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
        """Returns some rows of a microbatch. `start` is the seed of the step's random streams."""
        return Cut(rows, *self.weight(rows, objective), stream(start, self.first + mb), self.graph_for(rows.stop - rows.start))

    def weight(self, rows: Rows, objective: Objective) -> LossWeight:
        """Returns the weight of the loss of some rows."""
        if rows.start == rows.stop:  # no stage runs them, and `weigh` may not accept them
            return LossWeight(0.0, 0.0)
        if objective.kind is LossKind.SUM:  # sums are added without weights; only the last row of all counts, so the divisor is 1
            last = self.copy == self.copies - 1 and self.only in (None, self.microbatches - 1)
            return LossWeight(1.0, float(rows.stop == self.size and last))
        columns = self.named(objective.columns, rows) if objective.weigh is not None else None
        return objective.weight(self.targets(rows) if self.labelled else None, rows, columns)


@lru_cache(maxsize=64)
def _cuts(rows: Rows, first: int, count: int, cuts: int) -> tuple[Rows, ...]:
    """Returns the cuts `first` to `first + count` out of `cuts` equal cuts of some rows."""
    return tuple(rows.cut(index, cuts) for index in range(first, first + count))


def _one_cut(rows: Rows, only: int, count: int) -> tuple[Rows, ...]:
    """Returns `count` cuts, of which one has all rows."""
    return tuple(rows if index == only else Rows(0, 0) for index in range(count))


def _some_cuts(several: Several, count: int) -> Iterator[Rows]:
    """Yields `count` cuts of the rows of some microbatches; the others have no rows here."""
    start = 0
    for index in range(count):
        size = Rows(0, several.step_rows).cut(index, count).size if index in several.numbers else 0
        yield Rows(start, start + size) if size else Rows(0, 0)
        start += size


def _first_graph(rows: int) -> int:
    return 0


class Batches(dict[int, Batch]):
    """The batches of a walk by step. Each is created on first use; batches that are more than `kept` steps older are dropped."""

    def __init__(self, make: Callable[[int], Batch], kept: int) -> None:
        super().__init__()
        self._make, self._kept = make, kept

    def __missing__(self, step: int) -> Batch:
        for old in [s for s in self if s < step - self._kept]:
            del self[old]
        found = self[step] = self._make(step)
        return found
