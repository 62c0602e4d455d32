"""Random numbers for two runs that are compared: equal seeds, or one seed per draw.

If both runs draw the same numbers in the same order, equal seeds make them equal. Some models draw numbers that are not used
(layers with a drop rate of zero), and capture leaves such draws out. In that case each draw gets a seed of its own, computed from
the operation and its shape.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from meshwright.capture.trace.operations import is_random
from meshwright.torch_internals import DispatchMode


def seed_all(number: int) -> None:
    """Seed torch and Python, and numpy if it is loaded."""
    torch.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def python_states() -> dict[str, Any]:
    """Return the state of each generator outside of torch, by the name that users know."""
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found


def keep_states() -> Callable[[], None]:
    """Save the state of all generators. The returned function restores it."""
    own, numpy = random.getstate(), sys.modules.get("numpy")
    theirs = None if numpy is None else numpy.random.get_state()
    here = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore() -> None:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(theirs)
        torch.set_rng_state(here)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return restore


class Draws(DispatchMode):
    """Seeds every draw by its operation and shape, so that an unused draw does not affect the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs) and kwargs.get("generator") is None:
            first = args[0] if args else None
            key = f"{func} {tuple(first.shape) if isinstance(first, Tensor) else first}"
            torch.manual_seed(crc32(key.encode()))
        return func(*args, **kwargs)


class Alike(DispatchMode):
    """Makes all drawn numbers equal, so that a row does not depend on the other rows that are drawn with it."""

    VALUE = 0.4

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if is_random(func, args, kwargs) and isinstance(found, Tensor) and found.is_floating_point():
            found.fill_(self.VALUE)
        return found


class Counted(DispatchMode):
    """Counts the draws."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.draws += is_random(func, args, kwargs)
        return func(*args, **kwargs)
