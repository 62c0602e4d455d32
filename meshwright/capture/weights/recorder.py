"""Builds a model without its weights: large and random tensors only have a shape, and operations on them are recorded on a tape.

Small tensors without random numbers (ranges, tables, constants) are computed as usual, so code that reads them works. Code that
reads values which are drawn only later cannot be recorded, and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode

from meshwright.capture.weights.generator_states import Clocks
from meshwright.capture.weights.swap_tensor import put
from meshwright.capture.weights.tape import UNFILLED_MARK, Entry, Place, Tape, flat, mapped
from meshwright.capture.weights.torch_functions import (
    FACTORIES,
    OVERWRITES,
    READERS,
    STATISTICS,
    UNFILLED,
    changes_first,
    draws,
)
from meshwright.torch_internals import running_initialiser

SMALL = 1 << 16
"""Tensors of at most this many elements are computed if they contain no random numbers."""

META, CPU = torch.device("meta"), torch.device("cpu")


class Unrecorded(Exception):
    """An operation that cannot be recorded, with the reason."""


class Recorder(TorchFunctionMode):
    """Records torch functions while it is active. Functions on large or random tensors return shapes only.

    A storage is `vague` if its memory does not hold the values that it should have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.clocks = Clocks()
        self.vague: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._storages: list[UntypedStorage] = []

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", str(func)), dict(kwargs or {})
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        if name == "__deepcopy__":
            return self._deepcopy(*args)
        tensors = flat((args, named), Tensor)
        if not tensors and name not in FACTORIES:
            return func(*args, **named)
        for tensor in tensors:
            self.place(tensor)
        if name in READERS and any(map(self._is_vague, tensors)):
            raise Unrecorded(f"the values of a tensor are read ({name}) before they are drawn")
        return self._call(func, name, args, named, tensors)

    def place(self, tensor: Tensor) -> Place:
        """Return the place of a tensor. A storage that is seen for the first time existed before recording."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._numbers:
            self._storages.append(storage)
            number = self._numbers[id(storage)] = len(self._numbers)
            self.tape.given[number] = storage
        number = self._numbers[id(storage)]
        self.tape.sizes[number] = storage.nbytes()
        return Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    # -- attributes of tensors

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        asked, tensor = getattr(func.__self__, "__name__", ""), args[0]
        if func.__name__ == "__set__":
            if asked == "data" and args[1].device != tensor.device:
                put(tensor, args[1])
                return None
        elif asked == "device" and tensor.device == META:
            return CPU
        elif asked == "is_meta":
            return self._as_one()
        return func(*args)

    def _as_one(self) -> bool:
        """Record a running initialiser as one entry. It asks `is_meta`, gets True and does nothing else."""
        found = running_initialiser()
        if found is None:
            return False
        function, given = found
        target = given.pop(next(iter(given)))
        self._write(function, function.__name__, (target,), given, [target], ())
        return True

    def _deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            with self:
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    # -- calls

    def _call(self, func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any], tensors: list[Tensor]) -> Any:
        first = changes_first(name, getattr(func, "__module__", None))
        changed = _changed(name, args, named, first)
        noted, noted_named = mapped(self.place, args, Tensor), mapped(self.place, named, Tensor)
        vague = draws(name) or name in UNFILLED or any(map(self._is_vague, tensors))
        if self._is_real(func, name, args, named, tensors, changed):
            result = func(*args, **named)
        else:
            result = self._shapes(func, name, args, named, first)
            vague = True
        makes = tuple(self._made(tensor) for tensor in flat(result, Tensor))
        if vague:
            self.vague |= {self.place(t).storage for t in changed} | {place.storage for place in makes if place is not None}
        if changed or any(makes):
            self._write(func, UNFILLED_MARK if name in UNFILLED else name, noted, noted_named, changed, makes)
        return result

    def _is_real(
        self, func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any], tensors: list[Tensor], changed: list[Tensor]
    ) -> bool:
        """True if a call is really run: not if it draws random numbers, changes a tensor from before, or makes a large tensor."""
        if draws(name) or name in UNFILLED or any(t.device == META for t in tensors):
            return False
        if any(self.place(t).storage in self.tape.given for t in changed):
            return False
        if changed or name == "tensor":
            return True
        if tensors and sum(t.numel() for t in tensors) < SMALL >> 6:
            return True
        try:
            shapes = self._shapes(func, name, args, named, False)
        except (NotImplementedError, RuntimeError):  # a shape that depends on values
            return True
        found = flat(shapes, Tensor)
        return all(t.numel() <= SMALL for t in found) or _is_view(func, args, named, tensors)

    def _shapes(self, func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any], first: bool) -> Any:
        """Run a call without values."""
        target = (args or tuple(named.values()))[0]
        if first and isinstance(target, Tensor) and target.device != META:
            return None if name == "__setitem__" else target
        if name == "cpu":
            return target
        hidden: Callable[[Tensor], Tensor] = lambda t: t if t.device == META else t.detach().to(META)  # noqa: E731
        args, named = mapped(hidden, args, Tensor), mapped(hidden, named, Tensor)
        args, named = mapped(_moved, args, torch.device), mapped(_moved, named, torch.device)
        if name == "to":
            args = tuple(_moved(torch.device(a)) if isinstance(a, str) else a for a in args)
        if "device" in named or not flat((args, named), Tensor):
            named["device"] = _moved(torch.device(named.get("device") or CPU))
        named.pop("pin_memory", None)
        return func(*args, **named)

    def _made(self, tensor: Tensor) -> Place | None:
        """Return the place of a tensor that a call has just made, or None if its storage existed before."""
        if id(tensor.untyped_storage()) in self._numbers:
            return None
        place = self.place(tensor)
        del self.tape.given[place.storage]
        return place

    def _write(self, func: Any, name: str, args: Any, named: Any, changed: list[Tensor], makes: tuple[Place | None, ...]) -> None:
        args, named = mapped(self.place, args, Tensor), mapped(self.place, named, Tensor)
        target, *others = flat((args, named), Place) or [None]
        overwrites, random = name in OVERWRITES, name != UNFILLED_MARK and draws(name)
        written = frozenset(self.place(t).storage for t in changed)
        if random:
            self.vague |= written
        self.tape.entries.append(
            Entry(
                func,
                args,
                named,
                name,
                reads=frozenset(p.storage for p in (others if overwrites or target is None else [target, *others])),
                changes=written,
                makes=makes,
                draws=random,
                overwrites=overwrites,
                whole=overwrites and target.elements * target.dtype.itemsize == self.tape.sizes[target.storage],
                dtype=torch.get_default_dtype(),
                state=self.clocks.tick(named.get("generator")) if random else None,
            )
        )

    def _is_vague(self, tensor: Tensor) -> bool:
        return tensor.device == META or self.place(tensor).storage in self.vague


def _changed(name: str, args: tuple[Any, ...], named: Mapping[str, Any], first: bool) -> list[Tensor]:
    """Return the tensors whose values a call changes."""
    found: list[Tensor] = flat(named.get("out"), Tensor)
    if first:
        found += flat((args or tuple(named.values()))[0], Tensor)
    if name in STATISTICS:
        found += flat([*args[1:3], *(named.get(n) for n in STATISTICS[name])], Tensor)
    return found


def _is_view(func: Any, args: tuple[Any, ...], named: dict[str, Any], tensors: list[Tensor]) -> bool:
    """True if a call on large tensors in memory makes no new storage."""
    hidden = {id(t): t.detach().to(META) for t in tensors}
    mine = {id(t.untyped_storage()) for t in hidden.values()}
    look: Callable[[Tensor], Tensor] = lambda t: hidden[id(t)]  # noqa: E731
    result = func(*mapped(look, args, Tensor), **mapped(look, named, Tensor))
    return all(id(t.untyped_storage()) in mine for t in flat(result, Tensor))


def _moved(device: torch.device) -> torch.device:
    """Return the device of a tensor while it has no values."""
    if device.type not in ("cpu", "meta"):
        raise Unrecorded(f"the model is built on {device}")
    return META
