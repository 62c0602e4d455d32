"""Answers comparisons of a random number with a rate whose result is certain, so that the trace does not need the number.

`torch.rand` draws from [0, 1), so `torch.rand([]) < 0.0` is always false: a drop rate of zero never drops a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshwright.capture.trace.patches.replaced_attribute import replaced


class Never:
    """A drop rate of zero. Every random number is above it, so a comparison needs no value and nothing is ever dropped."""

    def __init__(self, seen: Callable[[object], None] = lambda drawn: None) -> None:
        self.seen = seen

    def __gt__(self, drawn: object) -> bool:
        self.seen(drawn)
        return False

    def __lt__(self, drawn: object) -> bool:
        self.seen(drawn)
        return True

    __ge__, __le__ = __gt__, __lt__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and other == 0

    def __hash__(self) -> int:
        return hash(0)

    def __bool__(self) -> bool:
        return False

    def __float__(self) -> float:
        return 0.0


_KNOWN: dict[str, Callable[[float], bool | None]] = {
    "__lt__": lambda rate: False if rate <= 0 else True if rate >= 1 else None,
    "__ge__": lambda rate: True if rate <= 0 else False if rate >= 1 else None,
    "__gt__": lambda rate: True if rate < 0 else False if rate >= 1 else None,
    "__le__": lambda rate: False if rate < 0 else True if rate >= 1 else None,
}
"""How a number from [0, 1) compares with a rate; None if that is not certain."""


@contextmanager
def certain_draws() -> Iterator[None]:
    """While a model is traced, answer comparisons of one number of `torch.rand` with a rate if the result is certain."""
    drawn: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
    truths: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
    known: dict[int, bool] = {}
    rand, truth = torch.rand, Tensor.__bool__

    def draw(*args: Any, **kwargs: Any) -> Tensor:
        found = rand(*args, **kwargs)
        if all(isinstance(size, int) and size == 1 for size in found.shape):
            drawn[id(found)] = found
        return found

    def comparing(compare: Any, certain: Callable[[float], bool | None]) -> Any:
        def compared(value: Tensor, rate: Any) -> Any:
            found = compare(value, rate)
            is_rate = isinstance(rate, int | float) and drawn.get(id(value)) is value and isinstance(found, Tensor)
            if is_rate and (answer := certain(rate)) is not None:
                truths[id(found)], known[id(found)] = found, answer
            return found

        return compared

    def asked(value: Tensor) -> bool:
        return known[id(value)] if truths.get(id(value)) is value else bool(truth(value))

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "rand", draw))
        stack.enter_context(replaced(Tensor, "__bool__", asked))
        for name, certain in _KNOWN.items():
            stack.enter_context(replaced(Tensor, name, comparing(getattr(Tensor, name), certain)))
        yield
