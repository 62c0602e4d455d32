"""Tracks which storage the values of a traced graph use, and which storages an operation writes into.

Storages are numbered while a graph is converted. Views of one tensor share a number, so a write is visible to every reader of
that memory, no matter which operation made the view. Writes are read from the operator's schema.
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
"""Composite operations that update running statistics, although their schemas do not declare it."""

FRESH = "aten.lift_fresh_copy"


class Memory:
    """The numbers of the storages of one trace."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, ...]] = {}
        self._held: list[UntypedStorage] = []  # keeps the storages alive, so that their ids stay unique
        self._states: dict[int, list[str]] = {}

    def of(self, value: Any) -> tuple[int, ...]:
        """Return the numbers of the storages that a value may use."""
        return tuple(dict.fromkeys(number for tensor in _tensors(value) for number in self._of(tensor.untyped_storage())))

    def _of(self, storage: UntypedStorage) -> tuple[int, ...]:
        if id(storage) not in self._numbers:
            self._numbers[id(storage)] = (len(self._held),)
            self._held.append(storage)
        return self._numbers[id(storage)]

    def made_by(self, node: torch.fx.Node) -> tuple[int, ...]:
        """Return the storages of the result of an operation.

        An operation such as reshape returns a view for some strides and a copy for others. Dropout returns its input in
        evaluation. Their results count as both, whatever the trace observed.
        """
        value = node.meta.get("val")
        if is_one_of(str(node.target), (FRESH,)) and isinstance(value, Tensor):
            # A constant of the forward is copied at every use; the trace has no separate storage for the copy.
            self._held.append(value.untyped_storage())
            self._numbers[id(value.untyped_storage())] = (len(self._held) - 1,)
            self._states.pop(id(value.untyped_storage()), None)
        elif is_one_of(str(node.target), DROPOUTS) and node.args[1] == 0 and isinstance(value, Tensor):
            # With a rate of 0 torch returns its input tensor itself; the trace has a different tensor.
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
        """Return the storages of a parameter, a buffer or a constant, and record its name for them."""
        for tensor in _tensors(value):
            self._of(tensor.untyped_storage())
            self._states.setdefault(id(tensor.untyped_storage()), []).append(name)
        return self.of(value)

    def written_by(self, node: torch.fx.Node) -> tuple[int, ...]:
        """Return the storages that an operation writes into. A region writes what its operations write."""
        return tuple(dict.fromkeys(number for value in _written_values(node) for number in self.of(value)))

    def changed_by(self, node: torch.fx.Node) -> tuple[str, ...]:
        """Return the names of the parameters and buffers that an operation wrote into during the trace."""
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
    """Yield the subgraphs that an operation such as `no_grad` runs."""
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
