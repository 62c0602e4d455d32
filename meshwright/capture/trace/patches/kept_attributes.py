"""Leave a model as it was before it was traced.

A forward may keep values in attributes of its modules, or of plain objects and containers in them (a cache, a counter). While it
is traced these are fake tensors and symbolic sizes, with which the model could neither run nor be copied. A forward may also
register hooks on its modules and note in an attribute that it has: both are set back together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has: modes, hooks, and the tables of parameters, buffers and submodules."""
HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))
"""The tables of hooks of a module."""
_NOT_SEARCHED = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.Generator)


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Sets attributes, lists and dicts back to what they held before the block."""
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(vars(module), dict(vars(module))) for module in model.modules()]
    hooks = [vars(module)[name] for module in model.modules() for name in HOOKS]
    lists: list[tuple[list[Any], list[Any]]] = []
    for _, held in list(tables):
        for name, value in held.items():
            if name in MODULE_ATTRIBUTES or isinstance(value, _NOT_SEARCHED):
                continue
            if isinstance(value, list):
                lists.append((value, list(value)))
            elif isinstance(value, dict):
                tables.append((value, dict(value)))
            elif hasattr(value, "__dict__"):
                tables.append((vars(value), dict(vars(value))))
    tables += [(table, dict(table)) for table in hooks]
    try:
        yield
    finally:
        for table, held in tables:
            _restore(table, held)
        for values, before in lists:
            if len(values) != len(before) or any(a is not b for a, b in zip(values, before, strict=True)):
                values[:] = before


def _restore(table: dict[Any, Any], held: dict[Any, Any]) -> None:
    for name in [name for name in table if name not in held]:
        del table[name]
    for name, value in held.items():
        if table.get(name) is not value:
            table[name] = value
