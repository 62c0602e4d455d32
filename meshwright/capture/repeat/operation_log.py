"""Runs a model on tensors without values and notes every operation: what it is called with, and who made what it reads.

This is many times faster than a trace. Two logs prove that blocks are equal: the log of the whole model must be that of the
shortened model with the operations of one block repeated. It compares what the blocks do, not what they look like: a block that
reads its own number and does something else because of it is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.capture.repeat.block_lists import BlockRun
from meshwright.capture.repeat.block_spread import BlockSpread, NotEqualError
from meshwright.capture.trace.batch_columns import Columns
from meshwright.capture.trace.export import traceable
from meshwright.capture.trace.graph import mapped
from meshwright.capture.trace.meta_stand_ins import replaced
from meshwright.torch_internals import DispatchMode, without_values

Source = str | tuple[int, int]
"""Who made a tensor: the name of a parameter, buffer or column, or the number of an operation and which of its results."""


_ASKS = "prim.device.default"
"""Where a tensor is: asked more often than anything is computed."""


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """One operation: its name, plain arguments and sizes as text, and who made the tensors that it reads."""

    text: str
    reads: tuple[Source, ...]


@dataclass(frozen=True)
class OperationLog:
    """The operations of a forward in order, and the first operation of each block."""

    operations: list[LoggedOperation] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)

    def repeated(self, run: BlockRun) -> OperationLog:
        """Returns the log of the whole list of a run, if this is the log of the shortened one."""
        spread = BlockSpread(tuple(self.starts[path] for path in run.kept), len(self.operations), len(run.left_out))
        found = [_moved(self.operations[at], at, by, spread, run) for at, by in spread.operations()]
        more = spread.period * spread.extra
        starts = {path: at if at < spread.starts[-1] else at + more for path, at in self.starts.items()}
        return OperationLog(found, starts)


def _moved(one: LoggedOperation, at: int, by: int, spread: BlockSpread, run: BlockRun) -> LoggedOperation:
    if not by:
        return one
    in_source = at in spread.source

    def read(source: Source) -> Source:
        if isinstance(source, str):
            return run.moved(source, by) if in_source else source
        return (spread.place(source[0], by), source[1]) if spread.moves(at, source[0]) else source

    return LoggedOperation(one.text, tuple(map(read, one.reads)))


def operation_log(model: nn.Module, columns: Columns, example: Mapping[str, Tensor], blocks: Iterable[str]) -> OperationLog:
    """Runs a model in training mode. `blocks` are the paths of the blocks whose first operations are noted."""
    found = OperationLog()
    with traceable(model, training=True), _starts(model, blocks, found), without_values() as values:
        given = {name: values.from_tensor(t) for name, t in example.items()}
        every = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        states = {name: values.from_tensor(t) for name, t in every.items()}
        with replaced(model, every, states), _Log(found, states, given):
            columns.call(model, given)
    return found


@contextmanager
def _starts(model: nn.Module, blocks: Iterable[str], log: OperationLog) -> Iterator[None]:
    def note(path: str, *_: Any) -> None:
        if log.starts.setdefault(path, len(log.operations)) != len(log.operations):
            raise NotEqualError(f"{path} is called twice")

    handles = [model.get_submodule(path).register_forward_pre_hook(partial(note, path)) for path in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Log(DispatchMode):
    """Notes every operation. Tensors are kept, so that the id of one is never that of another."""

    def __init__(self, log: OperationLog, states: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._log, self._kept = log, [*states.values(), *columns.values()]
        self._sources: dict[int, Source] = {id(tensor): f"column {name}" for name, tensor in columns.items()}
        for name, tensor in states.items():  # a tied parameter has its first name
            self._sources.setdefault(id(tensor), name)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        if str(function) == _ASKS:
            return function(*args)
        reads: list[Source] = []

        def token(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            reads.append(self._sources.get(id(leaf), "constant"))
            return _size(leaf)

        given = mapped((args, kwargs or {}), token)  # before it runs: it may write into its arguments
        found = function(*args, **(kwargs or {}))
        results = [leaf for leaf in (found if isinstance(found, tuple | list) else (found,)) if isinstance(leaf, Tensor)]
        number = len(self._log.operations)
        for place, tensor in enumerate(results):
            self._sources[id(tensor)] = (number, place)
        self._kept += results
        self._log.operations.append(LoggedOperation(f"{function} {given} {[*map(_size, results)]}", tuple(reads)))
        return found


def _size(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
