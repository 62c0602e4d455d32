"""Keeps a user's `torch.autograd.Function` as one opaque operation during tracing, so that its own backward is not lost.

A trace would follow the forward of such a function and drop its backward. While a model is traced, the forwards of all such
classes are replaced by one custom operation. Its node records the class and the arguments, and the captured layer calls the class
itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.trace.operations import is_random
from meshwright.errors import MeshwrightError
from meshwright.torch_internals import DispatchMode, written_arguments

FUNCTION = "meshwright.function"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@torch.library.custom_op("meshwright::function", mutates_args=())
def function(tensors: list[Tensor], key: str) -> list[Tensor]:
    """Placeholder for a call of a user's function in a trace; it is never run."""
    raise AssertionError("a captured layer calls the function itself")


@function.register_fake
def _(tensors: list[Tensor], key: str) -> list[Tensor]:
    return _CALLS[key].trace(tensors)


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """The position of a tensor among the tensors of a call."""

    index: int


@dataclass
class Call:
    """One call of a function: the name of its class, its arguments with slots for tensors, and what the trace observed."""

    name: str
    arguments: tuple[Any, ...]
    forward: Callable[..., Any]
    has_context: bool
    random: bool = False
    result: Any = None

    def trace(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the forward to get its output shapes. Raises if the forward writes into its arguments."""
        arguments = [tensors[a.index] if isinstance(a, ArgumentSlot) else a for a in self.arguments]
        context = [_Context(self.name, arguments)] if self.has_context else []
        with _Watching(tensors) as seen, torch.no_grad():
            result = self.forward(*context, *arguments)
        self.random |= seen.draws
        if seen.writes:
            raise _refused(self.name, "writes into its arguments", "copy them first, or do the in-place operation outside of it")
        several = isinstance(result, tuple | list)
        parts = list(result) if several else [result]
        made = [part for part in parts if isinstance(part, Tensor)]
        slots = iter(range(len(made)))
        places = tuple(ArgumentSlot(next(slots)) if isinstance(part, Tensor) else part for part in parts)
        self.result = places if several else places[0]
        return [torch.empty_like(t) for t in made]

    def returned(self, made: list[Tensor]) -> Any:
        """Return what the forward returns, with these tensors filled in."""
        if isinstance(self.result, tuple):
            return tuple(made[part.index] if isinstance(part, ArgumentSlot) else part for part in self.result)
        return made[self.result.index] if isinstance(self.result, ArgumentSlot) else self.result


_CALLS: dict[str, Call] = {}
"""The calls of the current trace. The custom operation can only receive a key into this table."""


@dataclass
class _Context:
    """Stands for the `ctx` of a function during tracing. It saves nothing, because no backward follows."""

    name: str
    arguments: list[Any]
    needs_input_grad: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) for a in self.arguments)

    def save_for_backward(self, *tensors: Any) -> None:
        """Do nothing."""

    save_for_forward = mark_non_differentiable = set_materialize_grads = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None:
        raise _refused(self.name, "writes into its arguments (mark_dirty)", "return a new tensor")


class _Watching(DispatchMode):
    """Records whether random numbers are drawn and whether one of the given tensors is written into."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.held = {id(t.untyped_storage()): t for t in tensors}
        self.draws = self.writes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= is_random(func, args, kwargs or {})
        written = written_arguments(func, args, kwargs or {})
        self.writes |= any(isinstance(t, Tensor) and id(t.untyped_storage()) in self.held for t in written)
        return func(*args, **(kwargs or {}))


@contextmanager
def functions_whole() -> Iterator[dict[str, Call]]:
    """While a model is traced, record every call of a user's function as one operation. Yields the table of these calls."""
    own = [cls for cls in _every(torch.autograd.Function) if "forward" in vars(cls) and not cls.__module__.startswith("torch.")]
    kept = {cls: vars(cls)["forward"] for cls in own}
    _CALLS.clear()
    try:
        for cls in own:
            cls.forward = staticmethod(_standing_for(cls, cls.forward))  # type: ignore[method-assign]
        yield _CALLS
    finally:
        for cls, forward in kept.items():
            cls.forward = forward


def _every(cls: Any) -> Iterator[Any]:
    for child in cls.__subclasses__():
        yield child
        yield from _every(child)


def _standing_for(cls: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    has_context = cls.setup_context is torch.autograd.Function.setup_context

    def stand(*given: Any) -> Any:
        if not torch.compiler.is_exporting():
            return forward(*given)
        arguments = given[1:] if has_context else given
        name = _named(cls)
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        slots = iter(range(len(tensors)))
        places = tuple(ArgumentSlot(next(slots)) if isinstance(a, Tensor) else _plain(name, a) for a in arguments)
        key = str(len(_CALLS))
        call = _CALLS[key] = Call(name, places, forward, has_context)
        made = function(tensors, key)
        return call.returned(made)

    return stand


def _named(cls: Any) -> str:
    """Return the name by which `class_of` finds the class."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = class_of(name)
    except (ImportError, AttributeError):
        found = None
    if found is not cls:
        raise _refused(name, "is not found by its name in its module", "define the class at the top level of a module")
    return name


def class_of(name: str) -> Any:
    """Return the class of a function by its name."""
    module, _, path = name.partition(":")
    at: Any = importlib.import_module(module)
    for part in path.split("."):
        at = getattr(at, part)
    return at


def _plain(name: str, argument: Any) -> Any:
    if isinstance(argument, _PLAIN):
        return argument
    if isinstance(argument, tuple | list) and all(isinstance(part, _PLAIN) for part in argument):
        return tuple(argument)
    what = type(argument).__name__
    raise _refused(name, f"takes {what}, which a captured graph cannot hold", "pass only tensors and plain numbers")


def _refused(name: str, why: str, fix: str) -> MeshwrightError:
    return MeshwrightError(f"the autograd.Function {name.partition(':')[2]} {why}", fix=fix)


class Function(nn.Module):
    """Calls a user's function, with its own backward, inside a captured layer. Returns the tensors among its results."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.apply_to = name, class_of(name).apply

    def forward(self, *arguments: Any) -> list[Tensor]:
        """Call the function."""
        result = self.apply_to(*arguments)
        return [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]

    def __reduce__(self) -> Any:
        return type(self), (self.name,), {"training": self.training}
