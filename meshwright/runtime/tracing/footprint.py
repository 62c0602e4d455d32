"""Bytes of a real step: what autograd keeps of each stage until its backward, and what crosses behind it.

    with footprint.watching(engine.graphs.stages):
        engine.run(batch, step)

Kept are the tensors that autograd has saved, each piece of memory once, and the input of a stage; not weights, and not the
columns of the batch, which are there anyway. With recompute, what it brings back counts too. Results do not change: a saved
tensor is noted and handed back as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.runtime.stage.stage import Bundle, Record, Stage


@dataclass
class Totals:
    """The rows that a stage has seen on this rank, and their bytes; `gradient` is of its inputs."""

    rows: int = 0
    kept: int = 0
    output: int = 0
    gradient: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.rows + other.rows, self.kept + other.kept, self.output + other.output, self.gradient + other.gradient)


@dataclass
class Footprint:
    """What was counted on one rank, by stage."""

    stages: dict[int, Totals] = field(default_factory=lambda: defaultdict(Totals))
    _seen: dict[int, set[int]] = field(default_factory=dict)

    @contextmanager
    def watching(self, stages: Iterable[tuple[int, Stage]]) -> Iterator[None]:
        """Count what these stages do meanwhile."""
        watched = list(stages)
        for number, stage in watched:
            vars(stage).update(
                forward=partial(self._forward, number, stage, stage.forward),
                recompute=partial(self._recompute, number, stage, stage.recompute),
                backward=partial(self._backward, number, stage, stage.backward),
            )
        try:
            yield
        finally:
            self._seen.clear()
            for _, stage in watched:
                for name in ("forward", "recompute", "backward"):
                    del vars(stage)[name]

    def _forward(self, number: int, stage: Stage, forward: Callable[[Record], Bundle], record: Record) -> Bundle:
        given = record.inputs if stage.first_layer else ()
        with self._noting(number, stage, record, given):
            found = forward(record)
        totals, (start, stop) = self.stages[number], record.cut.rows
        totals.rows += stop - start
        totals.output += 0 if stage.is_last else _bytes(found.tensors)
        return found

    def _recompute(self, number: int, stage: Stage, recompute: Callable[[Record], None], record: Record) -> None:
        with self._noting(number, stage, record, ()):
            recompute(record)

    def _backward(
        self, number: int, stage: Stage, backward: Callable[..., tuple[Tensor, ...]], record: Record, *given: Any, **more: Any
    ) -> tuple[Tensor, ...]:
        self._seen.pop(id(record), None)
        found = backward(record, *given, **more)
        self.stages[number].gradient += _bytes(found)
        return found

    @contextmanager
    def _noting(self, number: int, stage: Stage, record: Record, given: Sequence[Tensor]) -> Iterator[None]:
        """Count memory that autograd saves in here, once per record; it is held until the end, so that none takes its place."""
        left_out = {_place(t) for layer in stage.layers for t in (*layer.parameters(), *layer.buffers())}
        left_out |= {_place(t) for weights in record.weights or () for t in weights.values()}
        batch = [*record.columns.values(), *record.named.values(), *([] if record.target is None else [record.target])]
        left_out |= {_place(t) for t in batch}
        seen = self._seen.setdefault(id(record), set())
        held: list[Any] = []

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if (place := storage.data_ptr()) not in left_out and place not in seen:
                seen.add(place)
                held.append(storage)
                self.stages[number].kept += storage.nbytes()
            return tensor

        for tensor in given:
            note(tensor)
        with saved_tensors_hooks(note, _as_it_is):
            yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
