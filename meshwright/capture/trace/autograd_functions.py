"""A user's `torch.autograd.Function` while a model is traced: one opaque operation, so that its own backward is kept.

A trace would follow the forward of such a function and drop its backward. Here the forwards of all such classes are replaced,
for the time of a trace, by one operation whose node remembers class and arguments; a captured layer calls the class itself.
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
    """What stands in a trace for a call of a user's function; never run as it is."""
    raise AssertionError("a captured layer calls the function itself")


@function.register_fake
def _(tensors: list[Tensor], key: str) -> list[Tensor]:
    return _CALLS[key].trace(tensors)


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """The place of a tensor among the arguments of a call."""

    index: int


@dataclass
class Call:
    """One call of a function: its class by name, its arguments with slots for tensors, and what a trace saw of it."""

    name: str
    arguments: tuple[Any, ...]
    forward: Callable[..., Any]
    has_context: bool
    random: bool = False
    result: Any = None

    def trace(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the forward for its shapes; writes into arguments are refused."""
        arguments = [tensors[a.index] if isinstance(a, ArgumentSlot) else a for a in self.arguments]
        context = [_Context(self.name, arguments)] if self.has_context else []
        with _Watching(tensors) as seen, torch.no_grad():
            result = self.forward(*context, *arguments)
        self.random |= seen.draws
        if seen.writes:
            raise _refused(self.name, "writes into its arguments", "a copy of them, or an in-place operation outside of it")
        several = isinstance(result, tuple | list)
        parts = list(result) if several else [result]
        made = [part for part in parts if isinstance(part, Tensor)]
        slots = iter(range(len(made)))
        places = tuple(ArgumentSlot(next(slots)) if isinstance(part, Tensor) else part for part in parts)
        self.result = places if several else places[0]
        return [torch.empty_like(t) for t in made]

    def returned(self, made: list[Tensor]) -> Any:
        """What the forward returns, with these tensors in it."""
        if isinstance(self.result, tuple):
            return tuple(made[part.index] if isinstance(part, ArgumentSlot) else part for part in self.result)
        return made[self.result.index] if isinstance(self.result, ArgumentSlot) else self.result


_CALLS: dict[str, Call] = {}
"""The calls of the trace that is being made; the operation can only be handed a key."""


@dataclass
class _Context:
    """Stands for the context of a function in a trace, where nothing is kept for a backward."""

    name: str
    arguments: list[Any]
    needs_input_grad: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) for a in self.arguments)

    def save_for_backward(self, *tensors: Any) -> None:
        """Nothing is kept."""

    save_for_forward = mark_non_differentiable = set_materialize_grads = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None:
        raise _refused(self.name, "writes into its arguments (mark_dirty)", "a new tensor as its result")


class _Watching(DispatchMode):
    """Sees whether random numbers are drawn, and whether some tensors are written into."""

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
    """While a model is traced: calls of users' functions are one operation each; the table says what they call."""
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
    """The name that `class_of` finds the class by."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = class_of(name)
    except (ImportError, AttributeError):
        found = None
    if found is not cls:
        raise _refused(name, "is not found by its name in its module", "a class at the top level of a module")
    return name


def class_of(name: str) -> Any:
    """A function's class by its name."""
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
    raise _refused(name, f"takes {what}, which a captured graph cannot hold", "tensors and plain numbers as its arguments")


def _refused(name: str, why: str, fix: str) -> MeshwrightError:
    return MeshwrightError(f"the autograd.Function {name.partition(':')[2]} {why}", fix=fix)


class Function(nn.Module):
    """A user's function in a captured layer: called as it is, with its own backward. Returns its tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.apply_to = name, class_of(name).apply

    def forward(self, *arguments: Any) -> list[Tensor]:
        """Call it."""
        result = self.apply_to(*arguments)
        return [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]

    def __reduce__(self) -> Any:
        return type(self), (self.name,), {"training": self.training}
