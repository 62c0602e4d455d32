"""The plain values and tensors of a model, also inside its lists, dicts and objects (a config), by path.

    attached = AttachedValues.of(model)
    attached.same()         does every container still hold the same objects? fast enough to call at every step
    attached.values         {"Net.cfg.beta": 0.5, "Net.weights['kl']": 0.1, "norm.running_mean": a tensor}
    attached.writes         {"Net.mask": 3}: how often each tensor that is not a buffer was changed in place

The search covers attributes, buffers, dicts, lists, tuples, and objects with attributes, to a depth of DEPTH and up to MOST
values. It skips containers with more than LARGE values (a vocabulary), sets, arrays, and objects of torch (an optimizer).
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

from meshwright.capture.trace.patches.kept_attributes import MODULE_ATTRIBUTES
from meshwright.torch_internals import module_tables, write_count

PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH, LARGE, MOST = 6, 1000, 20_000
END = object()
_NOT_SEARCHED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Enum, logging.Logger, logging.Handler)


@dataclass(frozen=True)
class Nested:
    """The entry in `values` for a container. The values inside the container have entries of their own."""

    kind: str
    count: int | None

    def __str__(self) -> str:
        return f"a {self.kind}" if self.count is None else f"a {self.kind} of {self.count}"


@dataclass
class AttachedValues:
    """The values of a model at one time."""

    values: dict[str, Any] = field(default_factory=dict)
    _views: list[Iterable[Any]] = field(default_factory=list)
    _objects: list[Any] = field(default_factory=lambda: [END])
    _seen: set[int] = field(default_factory=set)
    _constants: dict[str, Tensor] = field(default_factory=dict)
    _model_storages: set[int] = field(default_factory=set)
    writes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> AttachedValues:
        """Collects the values of a model."""
        found = cls(_model_storages={_storage(t) for t in chain(model.parameters(), model.buffers())})
        for module in model.modules():
            found._seen.add(id(module))
            for table in (vars(module), *module_tables(module)):
                found._watch(table.values())
        for path, module in model.named_modules():
            owner = path or type(module).__name__
            for name, value in vars(module).items():
                if name not in MODULE_ATTRIBUTES:
                    found._add(f"{owner}.{name}", value, 0)
            for name, buffer in module_tables(module)[2].items():
                found._add(f"{owner}.{name}", buffer, 0)
        found.writes = found._count_writes()
        return found

    def same(self) -> bool:
        """Returns whether every container holds the same objects as before. One pass in C, with no Python loop over objects."""
        return all(map(is_, chain.from_iterable((*self._views, (END,))), self._objects)) and self._count_writes() == self.writes

    def _count_writes(self) -> dict[str, int]:
        return {path: write_count(tensor) for path, tensor in self._constants.items()}

    def _watch(self, view: Iterable[Any]) -> None:
        """Adds a container to those that `same` compares. END stays last, so a container that grows or shrinks differs."""
        self._views.append(view)
        self._objects[-1:] = [*view, END]

    def _add(self, path: str, value: Any, depth: int) -> None:
        if len(self.values) >= MOST:
            return
        if isinstance(value, (*PLAIN, Tensor)) or (isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value)):
            self.values[path] = value
            if isinstance(value, Tensor) and not value.is_inference() and _storage(value) not in self._model_storages:
                self._constants[path] = value
            return
        self.values[path] = Nested(type(value).__name__, len(value) if isinstance(value, dict | list | tuple) else None)
        if depth >= DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for name, inner in self._inside(value):
            self._add(f"{path}{name}", inner, depth + 1)

    def _inside(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yields the values in a container, each with its path. A mutable container is also watched."""
        if isinstance(value, dict):
            if len(value) <= LARGE:
                self._watch(dict.values(value))
                yield from ((f"[{key!r}]", inner) for key, inner in dict.items(value) if isinstance(key, PLAIN))
        elif isinstance(value, list | tuple):
            if len(value) <= LARGE:
                if isinstance(value, list):
                    self._watch(value)
                yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
        elif not isinstance(value, _NOT_SEARCHED) and _has_attributes(value):
            own: dict[str, Any] = vars(value)
            self._watch(own.values())
            yield from ((f".{name}", inner) for name, inner in own.items())
        elif is_dataclass(value) and not isinstance(value, type):
            self._watch(_Slots(value))
            yield from ((f".{name}", inner) for name, inner in _Slots(value).items())


class _Slots:
    """A view of the current values of a dataclass with slots."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def items(self) -> list[tuple[str, Any]]:
        return [(each.name, getattr(self.owner, each.name, None)) for each in fields(self.owner)]

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self.items())


def _storage(tensor: Tensor) -> int:
    """Returns an id of a tensor's storage, which views of a buffer share. A sparse tensor has no storage: returns its own id."""
    return id(tensor) if tensor.layout is not torch.strided else id(tensor.untyped_storage())


def _has_attributes(value: Any) -> bool:
    """Returns whether an object has attributes and its class is not defined by torch."""
    return isinstance(getattr(value, "__dict__", None), dict) and type(value).__module__.partition(".")[0] != "torch"
