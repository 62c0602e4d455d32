"""The plain values and tensors that belong to a model, also inside its lists, dicts and objects (a config), by path.

    attached = Attached.of(model)
    attached.same()         is every container still filled with the very same objects? quick, for every step
    attached.values         {"Net.cfg.beta": 0.5, "Net.weights['kl']": 0.1, "norm.running_mean": a tensor}
    attached.written        {"Net.mask": 3}: how often each tensor that is no buffer was written to in place

Seen are attributes, buffers, dicts, lists, tuples, and objects with attributes of their own, to a depth of DEPTH and up to MOST
values. Not seen: containers of more than LARGE values (a vocabulary), sets, arrays, and objects of torch (an optimizer).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.torch_internals import module_tables, write_count

PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH, LARGE, MOST = 6, 1000, 20_000
END = object()
_CLOSED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Enum, logging.Logger, logging.Handler)
_OWN = frozenset(vars(nn.Module()))
"""What every module has: modes, hooks, and tables that are looked at by themselves."""


@dataclass(frozen=True)
class Nested:
    """Stands in `values` for a container, whose own values follow: another kind of value than a number or a tensor."""

    kind: str
    count: int | None

    def __str__(self) -> str:
        return f"a {self.kind}" if self.count is None else f"a {self.kind} of {self.count}"


@dataclass
class AttachedValue:
    """What was found at one time."""

    values: dict[str, Any] = field(default_factory=dict)
    _views: list[Iterable[Any]] = field(default_factory=list)
    _were: list[Any] = field(default_factory=lambda: [END])
    _seen: set[int] = field(default_factory=set)
    _loose: dict[str, Tensor] = field(default_factory=dict)
    _followed: set[int] = field(default_factory=set)
    written: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> AttachedValue:
        """Look at a model."""
        found = cls(_followed={_storage(t) for t in chain(model.parameters(), model.buffers())})
        for module in model.modules():
            found._seen.add(id(module))
            for table in (vars(module), *module_tables(module)):
                found._watch(table.values())
        for path, module in model.named_modules():
            owner = path or type(module).__name__
            for name, value in vars(module).items():
                if name not in _OWN:
                    found._add(f"{owner}.{name}", value, 0)
            for name, buffer in module_tables(module)[2].items():
                found._add(f"{owner}.{name}", buffer, 0)
        found.written = found._written()
        return found

    def same(self) -> bool:
        """Is every container filled as it was, object by object? All in one pass, without a line of Python for each."""
        return all(map(is_, chain.from_iterable((*self._views, (END,))), self._were)) and self._written() == self.written

    def _written(self) -> dict[str, int]:
        return {path: write_count(tensor) for path, tensor in self._loose.items()}

    def _watch(self, view: Iterable[Any]) -> None:
        """Look at a container from now on; END stays last, so that one that grows or shrinks is seen."""
        self._views.append(view)
        self._were[-1:] = [*view, END]

    def _add(self, path: str, value: Any, depth: int) -> None:
        if len(self.values) >= MOST:
            return
        if isinstance(value, (*PLAIN, Tensor)) or (isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value)):
            self.values[path] = value
            if isinstance(value, Tensor) and not value.is_inference() and _storage(value) not in self._followed:
                self._loose[path] = value
            return
        self.values[path] = Nested(type(value).__name__, len(value) if isinstance(value, dict | list | tuple) else None)
        if depth >= DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for name, inner in self._inside(value):
            self._add(f"{path}{name}", inner, depth + 1)

    def _inside(self, value: Any) -> Iterator[tuple[str, Any]]:
        """What a container holds, with how it is reached; a mutable one is watched."""
        if isinstance(value, dict):
            if len(value) <= LARGE:
                self._watch(dict.values(value))
                yield from ((f"[{key!r}]", inner) for key, inner in dict.items(value) if isinstance(key, PLAIN))
        elif isinstance(value, list | tuple):
            if len(value) <= LARGE:
                if isinstance(value, list):
                    self._watch(value)
                yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
        elif not isinstance(value, _CLOSED) and _is_open(value):
            own: dict[str, Any] = vars(value)
            self._watch(own.values())
            yield from ((f".{name}", inner) for name, inner in own.items())
        elif is_dataclass(value) and not isinstance(value, type):
            self._watch(_Slots(value))
            yield from ((f".{name}", inner) for name, inner in _Slots(value).items())


class _Slots:
    """The values of a dataclass that has slots, as they are when they are asked for."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def items(self) -> list[tuple[str, Any]]:
        return [(each.name, getattr(self.owner, each.name, None)) for each in fields(self.owner)]

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self.items())


def _storage(tensor: Tensor) -> int:
    """The memory of a tensor, by which views of a buffer are known; sparse tensors have none and are known by themselves."""
    return id(tensor) if tensor.layout is not torch.strided else id(tensor.untyped_storage())


def _is_open(value: Any) -> bool:
    """Has it attributes of its own, and is it none of torch's?"""
    return isinstance(getattr(value, "__dict__", None), dict) and type(value).__module__.partition(".")[0] != "torch"
