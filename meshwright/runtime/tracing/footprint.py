"""Measure the bytes of a real step: what autograd saves for the backward of each stage, and what each stage sends.

    with footprint.watching(engine.graphs.stages):
        engine.run(batch, step)

Counted are the tensors that autograd has saved, each storage once, and the input of a stage. Weights and the columns of the
batch are not counted, because they are in memory anyway. With recompute, the tensors that it creates count too. Results do not
change: a saved tensor is recorded and returned unchanged.
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
    """The number of rows that a stage has processed on this rank, and their bytes. `gradient` counts gradients of its inputs."""

    rows: int = 0
    kept: int = 0
    output: int = 0
    gradient: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.rows + other.rows, self.kept + other.kept, self.output + other.output, self.gradient + other.gradient)


@dataclass
class Footprint:
    """The totals of one rank, by stage."""

    stages: dict[int, Totals] = field(default_factory=lambda: defaultdict(Totals))
    _seen: dict[int, set[int]] = field(default_factory=dict)

    @contextmanager
    def watching(self, stages: Iterable[tuple[int, Stage]]) -> Iterator[None]:
        """Counts what these stages do inside the context."""
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
        """Counts the storages that autograd saves inside the context, once per record.

        They are kept alive until the end, so that no new storage gets the same address.
        """
        left_out = {_address(t) for layer in stage.layers for t in (*layer.parameters(), *layer.buffers())}
        left_out |= {_address(t) for weights in record.weights or () for t in weights.values()}
        batch = [*record.columns.values(), *record.named.values(), *([] if record.target is None else [record.target])]
        left_out |= {_address(t) for t in batch}
        seen = self._seen.setdefault(id(record), set())
        held: list[Any] = []

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if (address := storage.data_ptr()) not in left_out and address not in seen:
                seen.add(address)
                held.append(storage)
                self.stages[number].kept += storage.nbytes()
            return tensor

        for tensor in given:
            note(tensor)
        with saved_tensors_hooks(note, _unchanged):
            yield


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
