"""Refuses numbers from Python's and numpy's generators: a captured graph would reuse the number of the trace in every step.

Two cases are allowed: the forward seeds the generator itself (BigBird's blocks), or it only compares the number with a layer drop
rate of zero. Generators that a model owns (`random.Random()`, `default_rng()`) are not detected here.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.capture.trace.patches.replaced_attribute import replaced
from meshwright.errors import MeshwrightError

_UNKNOWN, _SEEDED = b"unknown", b"seeded"
"""Used instead of a state: one that differs in every call, and one that is the same in every call."""


class Generators:
    """The global generators, and the states that they would have if the forward had drawn nothing that matters."""

    def __init__(self) -> None:
        self.expected = _states()
        self.moved: dict[str, str] = {}
        """Generators that a number was drawn from, with the module whose forward drew it."""
        self.inside: list[str] = []

    def harmless(self, drawn: object) -> None:
        """Accept the last number drawn: it was only compared with a rate of zero."""
        for name, state in _states().items() if isinstance(drawn, float) else ():
            if self.expected[name] not in (_UNKNOWN, _SEEDED) and state == _after_one(name, self.expected[name]):
                self.expected[name] = state

    def look(self) -> None:
        """Record the generators whose state is not the expected one."""
        for name, state in _states().items():
            if name not in self.moved and self.expected[name] not in (state, _SEEDED):
                self.moved[name] = f"{name} in {self.inside[-1]}" if self.inside and self.inside[-1] else name

    def enter(self, module: str) -> None:
        """Called when the forward of a module begins."""
        self.look()
        self.inside.append(module)

    def leave(self) -> None:
        """Called when the forward of the innermost module ends."""
        self.look()
        self.inside.pop()

    def seeding(self, name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the seed function of a generator: numbers drawn after it are the same in every call."""

        def look_and_seed(*args: Any, **kwargs: Any) -> Any:
            self.look()
            found = seed(*args, **kwargs)
            self.expected[name] = _UNKNOWN if all(value is None for value in (*args, *kwargs.values())) else _SEEDED
            return found

        return look_and_seed


@contextmanager
def nothing_frozen(model: nn.Module) -> Iterator[Generators]:
    """While a model is traced, detect numbers that a graph would freeze. Raises at the end; the generators are restored."""
    watched = Generators()
    before = dict(watched.expected)
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    try:
        with ExitStack() as stack:
            for name in before:
                owner = _owner(name)
                stack.enter_context(replaced(owner, "seed", watched.seeding(name, owner.seed)))
            for hook in (
                register_module_forward_pre_hook(lambda module, given: watched.enter(names.get(module, ""))),
                register_module_forward_hook(lambda module, given, result: watched.leave()),
            ):
                stack.callback(hook.remove)
            yield watched
        watched.look()
    finally:
        for name, state in before.items():
            _set(_owner(name), state)
    if watched.moved:
        raise MeshwrightError(
            f"the forward draws from {' and '.join(watched.moved.values())}, which a captured graph freezes: "
            "every step would use the numbers of the trace",
            fix="use torch.rand or similar in the forward, or pass the numbers as a column of the batch; if a speech model of "
            "transformers masks its input, set config.apply_spec_augment = False",
        )


def _owner(name: str) -> Any:
    return import_module(name)


def _states() -> dict[str, bytes]:
    return {name: _state(_owner(name)) for name in _names()}


@cache
def _names() -> tuple[str, ...]:
    """Numpy may not be installed."""
    return ("random", "numpy.random") if find_spec("numpy") else ("random",)


def _state(generator: Any) -> bytes:
    """Return the state of a generator, or of a module that acts as one."""
    return pickle.dumps(generator.getstate() if hasattr(generator, "getstate") else generator.get_state(legacy=False))


def _set(generator: Any, state: bytes) -> None:
    (generator.setstate if hasattr(generator, "setstate") else generator.set_state)(pickle.loads(state))


def _after_one(name: str, state: bytes) -> bytes:
    """Return the state after drawing one more number."""
    one = random.Random() if name == "random" else _owner(name).RandomState()
    _set(one, state)
    one.random()
    return _state(one)
