"""Parameters whose values other ranks have. They keep their shape, have no memory and read as NaN; a write to them raises.

A write would be lost when the values come back, and torch raises only if a tensor has more than one element, in words that do not
help. So a parameter has another class while its values are absent, and so have the views that a user gets of it. When training
has ended without them, a read raises too: nothing brings the values back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError

IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"))
"""Operators that write into their first argument. Functions of torch that do so have names that end with an underscore."""
NO_VALUES = frozenset({"requires_grad_", "detach_"})
"""Functions with such names that write no values."""
NO_READS = frozenset(
    ("__get__", "__repr__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "data_ptr", *NO_VALUES)
)
"""Functions that read no values, besides those whose names begin with `is_`. `__get__` is a property; some of them are views."""


def hide(parameter: nn.Parameter) -> None:
    """Frees the values of a parameter. Integers read as 0."""
    show(parameter)
    nothing = torch.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    parameter.data = parameter.data.new_full((), nothing).expand(parameter.shape)
    if type(parameter) is nn.Parameter:  # others have their own ways
        parameter.__class__ = AbsentParameter


def show(parameter: nn.Parameter) -> None:
    """Makes a parameter an ordinary one again. The caller gives it values."""
    if type(parameter) is AbsentParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def lose(parameters: Iterable[nn.Parameter]) -> None:
    """Makes reads of those parameters raise whose values are absent. Only `parameter.data = ...` gives them new ones."""
    for parameter in parameters:
        if type(parameter) is AbsentParameter:
            parameter.__class__ = LostParameter


class AbsentTensor(Tensor):
    """A view of a parameter without values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that has it as an argument."""
        return _run(func, args, kwargs or {})


class AbsentParameter(nn.Parameter):
    """A parameter without values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that has it as an argument."""
        return _run(func, args, kwargs or {})


class LostParameter(AbsentParameter):
    """A parameter that never gets its values back."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that has it as an argument."""
        if getattr(func, "__self__", None) is Tensor.data and func.__name__ == "__set__":
            args[0].__class__ = nn.Parameter
            return func(*args)
        name = getattr(func, "__name__", "")
        if name in NO_READS or name.startswith("is_"):
            found = super().__torch_function__(func, types, args, kwargs)
            if not isinstance(found, AbsentTensor):
                return found
        raise MeshwrightError(
            "a parameter was used whose values are on other ranks, and the session that trained it is closed",
            fix="session.broadcast_weights() before the session is closed, or session.export(folder)",
        )


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function that only reads. A view that it returns is absent too."""
    if _writes(func, args, kwargs):
        raise MeshwrightError(
            "a parameter was written whose values are on other ranks until its next use: the write would be lost",
            fix='dp_mode="zero-2" or "cyclic", which keep whole parameters; or change state["tensors"]["model/NAME"] of '
            "session.state_dict() and pass it to session.load_state_dict()",
        )
    found = nn.Parameter.__torch_function__(func, (), args, kwargs)  # as an ordinary parameter runs it
    of = args[0] if args and isinstance(args[0], AbsentTensor | AbsentParameter) else None
    is_view = type(found) is Tensor and of is not None and found.numel() and found.data_ptr() == of.data_ptr()
    return found.as_subclass(AbsentTensor) if is_view else found


def _writes(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a function of torch writes values into a tensor without values."""
    name = getattr(func, "__name__", "")
    if name == "__set__":  # `Module.to` sets what it has got back unchanged
        return getattr(func, "__self__", None) is Tensor.data and not isinstance(args[1], AbsentTensor | AbsentParameter)
    in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in NO_VALUES)
    into = args[0] if in_place else kwargs.get("out")
    return any(isinstance(t, AbsentTensor | AbsentParameter) for t in (into if isinstance(into, list | tuple) else (into,)))
