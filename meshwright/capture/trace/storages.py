"""Which memory the values of a traced graph live in, and which of it an operation writes into.

Storages are numbered while a graph is transcribed. Views of one tensor have the same number, so a write is seen by all who
read that memory, whatever the operation that made the view is called. Writes come from the operator's schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from meshwright.capture.trace.operations import DROPOUTS, VIEWS, is_higher_order, is_one_of
from meshwright.capture.trace.patches.train_eval_modes import MODE
from meshwright.torch_internals import written_arguments

_NORMS = ("aten.batch_norm", "aten.instance_norm")
"""Composite operations that update running statistics; their schemas do not say so."""

FRESH = "aten.lift_fresh_copy"


class Memory:
    """Numbers for the storages of one trace."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, ...]] = {}
        self._held: list[UntypedStorage] = []  # a storage that is alive keeps its id
        self._states: dict[int, list[str]] = {}

    def of(self, value: Any) -> tuple[int, ...]:
        """The numbers of the memory that a value may live in."""
        return tuple(dict.fromkeys(number for tensor in _tensors(value) for number in self._of(tensor.untyped_storage())))

    def _of(self, storage: UntypedStorage) -> tuple[int, ...]:
        if id(storage) not in self._numbers:
            self._numbers[id(storage)] = (len(self._held),)
            self._held.append(storage)
        return self._numbers[id(storage)]

    def made_by(self, node: torch.fx.Node) -> tuple[int, ...]:
        """The memory of what an operation returns.

        An operation such as reshape returns a view for some strides and a copy for others, and dropout returns its input in
        evaluation: their results count as both, whatever the trace has seen.
        """
        value = node.meta.get("val")
        if is_one_of(str(node.target), (FRESH,)) and isinstance(value, Tensor):
            # A constant of forward is copied whenever it is used; the trace has no memory for the copy.
            self._held.append(value.untyped_storage())
            self._numbers[id(value.untyped_storage())] = (len(self._held) - 1,)
            self._states.pop(id(value.untyped_storage()), None)
        elif is_one_of(str(node.target), DROPOUTS) and node.args[1] == 0 and isinstance(value, Tensor):
            # Without anything to drop torch returns the very tensor that it was given; the trace has another one.
            source = _value(node.args[0]).untyped_storage()
            self._held.append(value.untyped_storage())
            self._numbers[id(value.untyped_storage())] = self._of(source)
            self._states[id(value.untyped_storage())] = self._states.setdefault(id(source), [])
        elif is_one_of(str(node.target), VIEWS) and isinstance(value, Tensor):
            sources = node.args[:2] if is_one_of(str(node.target), (MODE,)) else node.args[:1]
            given = [number for source in sources for number in self.of(_value(source))]
            storage = value.untyped_storage()
            self._numbers[id(storage)] = tuple(dict.fromkeys((*self._of(storage), *given)))
        return self.of(value)

    def of_state(self, name: str, value: Any) -> tuple[int, ...]:
        """The memory of a parameter, a buffer or a constant, which is remembered by its name."""
        for tensor in _tensors(value):
            self._of(tensor.untyped_storage())
            self._states.setdefault(id(tensor.untyped_storage()), []).append(name)
        return self.of(value)

    def written_by(self, node: torch.fx.Node) -> tuple[int, ...]:
        """The memory that an operation writes into; a region of graph writes what its operations write."""
        return tuple(dict.fromkeys(number for value in _written_values(node) for number in self.of(value)))

    def changed_by(self, node: torch.fx.Node) -> tuple[str, ...]:
        """The names of the state that an operation writes into, as the trace has seen it."""
        storages = [id(t.untyped_storage()) for value in _written_values(node) for t in _tensors(value)]
        return tuple(dict.fromkeys(name for storage in storages for name in self._states.get(storage, ())))


def _written_values(node: torch.fx.Node) -> Iterator[Any]:
    if node.op != "call_function":
        return
    if is_higher_order(node.target):
        for graph in _bodies(node):
            for inner in graph.nodes:
                yield from _written_values(inner)
        return
    found: list[Any] = []
    torch.fx.map_arg(_written_arguments(node), lambda n: found.append(n.meta.get("val")))
    yield from found


def _written_arguments(node: torch.fx.Node) -> list[Any]:
    if is_one_of(str(node.target), _NORMS):
        return [a for a in node.args[3:5] if a is not None] if len(node.args) > 5 and node.args[5] is True else []
    return written_arguments(node.target, node.args, node.kwargs)


def _bodies(node: torch.fx.Node) -> Iterator[torch.fx.Graph]:
    """The graphs that a switch, such as `no_grad`, runs."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            owner: Any = argument.graph.owning_module
            for part in str(argument.target).split("."):
                owner = getattr(owner, part)
            if isinstance(owner, torch.fx.GraphModule):
                yield owner.graph


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple | list) else [value]) if isinstance(t, Tensor)]


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
