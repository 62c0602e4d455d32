"""Batches of a training or evaluation set for one rank: the rows of its data-parallel copy, starting at any step.

Map-style data sets (torch's, Hugging Face's, lists) are read by row number. Iterable data sets are read completely, and each copy
keeps its own rows. Random numbers that are drawn while rows are read and collated start from (seed, epoch, step, copy). So all
ranks of a copy get the same rows, and a resumed run gets the same rows as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset
from transformers import set_seed

from meshwright.errors import MeshwrightError
from meshwright.runtime import device as devices
from meshwright.runtime.stage.batch import Given, Own
from meshwright.train.data.collate import Collate, no_rows, stand_ins
from meshwright.train.data.own_microbatches import load
from meshwright.train.data.sampler import Sampler, share
from meshwright.train.data.step_rows import StepRows
from meshwright.train.data.vocabulary import Vocabulary, refuse_ids


class Position(NamedTuple):
    """A step of an epoch."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Source:
    """A data set, and how its rows become tensors."""

    dataset: Any
    collate: Collate
    seed: int
    copy: int = 0
    copies: int = 1
    needed: frozenset[str] | None = None
    processes: int = 0
    vocabularies: tuple[Vocabulary, ...] = ()
    microbatch: int | None = None
    """The microbatch of a step that the rows of this copy are, if they are one."""
    several: tuple[int, ...] | None = None
    """The microbatches of a step that this rank loads, out of `copies`, if it runs some of them."""

    @property
    def size(self) -> int | None:
        """The number of rows; None if it is not known before they are read."""
        return len(self.dataset) if has_rows(self.dataset) else None

    def example(self, count: int) -> Given:
        """Return the first rows as tensors, the same on all ranks."""
        rows = list(islice(iter(self.dataset), count)) if self.size is None else self._read(list(range(min(count, self.size))))
        if not rows:
            raise MeshwrightError("the data set is empty: there is nothing to train on")
        set_seed(self.seed)
        return self._tensors(rows)

    def batch(self, at: Position, rows: list[Any]) -> Own:
        """Return the tensors of this copy's rows. `rows` are all rows of the step."""
        if self.several is not None:
            return self._some(at, rows, list)
        set_seed(_word(self.seed, at.epoch, at.step, 1 + self.copy))
        mine = share(rows, self.copy, self.copies)
        given = self._tensors(mine or rows[:1])
        return Own(stand_ins(given if mine else no_rows(given), self.needed), self.microbatch)

    def numbered(self, at: Position, numbers: list[int]) -> Own:
        """Return the tensors of this copy for a step with these row numbers. Rows of other copies are not read."""
        if self.several is not None:
            return self._some(at, numbers, self._read)
        set_seed(_word(self.seed, at.epoch, at.step, 1 + self.copy))
        mine = share(numbers, self.copy, self.copies)
        given = self._tensors(self._read(mine or numbers[:1]))
        return Own(stand_ins(given if mine else no_rows(given), self.needed), self.microbatch)

    def _some(self, at: Position, rows: list[Any], read: Callable[[list[Any]], list[Any]]) -> Own:
        """Return the tensors of the microbatches that this rank loads, each with its own random numbers."""
        assert self.several is not None

        def tensors(number: int, mine: list[Any]) -> Given:
            set_seed(_word(self.seed, at.epoch, at.step, 1 + number))
            return self._tensors(read(mine))

        found = load(rows, self.several, self.copies, tensors)
        return replace(found, tensors=stand_ins(found.tensors, self.needed))

    def _tensors(self, rows: list[Any]) -> Given:
        """Collate rows into tensors, and check that the model knows all ids."""
        given = self.collate(rows)
        refuse_ids(self.vocabularies, given)
        return given

    def _read(self, numbers: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        found = many(numbers) if many is not None else [self.dataset[i] for i in numbers]
        return list(found)


def has_rows(dataset: Any) -> bool:
    """True if rows can be read by number."""
    streams = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    return not streams and isinstance(dataset, Sized)


class _Steps(TorchDataset[Own]):
    """The steps of an epoch as a data set, for torch's DataLoader and its processes."""

    def __init__(self, source: Source, sampler: Sampler, epoch: int) -> None:
        self.source, self.sampler, self.epoch = source, sampler, epoch
        self.order = sampler.order(epoch)

    def __getitem__(self, step: int) -> Own:
        start, stop = self.sampler.span(step)
        return self.source.numbered(Position(self.epoch, step), self.order[start:stop])


def numbered_steps(source: Source, sampler: Sampler, start: Position) -> Iterator[Own]:
    """Yield the steps of one epoch from a position on, read by row number."""
    steps = _Steps(source, sampler, start.epoch)
    wanted = range(start.step, sampler.steps)
    if not source.processes:
        yield from (steps[step] for step in wanted)
        return
    yield from DataLoader(steps, batch_size=None, sampler=wanted, num_workers=source.processes)  # type: ignore[arg-type]


def streamed_steps(source: Source, rows: StepRows, start: Position) -> Iterator[Own]:
    """Yield the steps of one pass through an iterable set from a position on. Earlier rows are read and dropped."""
    if hasattr(source.dataset, "set_epoch"):
        source.dataset.set_epoch(start.epoch)
    set_seed(_word(source.seed, start.epoch, 0, 0))
    stream, step = iter(source.dataset), 0
    while found := list(islice(stream, rows.step)):
        if step >= start.step:
            yield source.batch(Position(start.epoch, step), found)
        step += 1
        set_seed(_word(source.seed, start.epoch, step, 0))  # all copies read the same rows next


def _word(seed: int, epoch: int, step: int, copy: int) -> int:
    """Return a seed that every generator accepts."""
    return devices.stream(seed, epoch, step, copy) % (1 << 32)


def without_unused(dataset: Any, columns: frozenset[str] | None) -> Any:
    """Return a Hugging Face data set without the columns that the model does not take, so that they are never read."""
    names = getattr(dataset, "column_names", None)
    if columns is None or not isinstance(names, list) or not hasattr(dataset, "remove_columns"):
        return dataset
    unused = [name for name in names if name not in columns]
    if len(unused) == len(names):
        raise MeshwrightError(
            f"the data set has the columns {', '.join(names)}; the model takes {', '.join(sorted(columns))}",
            fix="rename a column, or set remove_unused_columns=False",
        )
    return dataset.remove_columns(unused) if unused else dataset
