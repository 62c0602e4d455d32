"""A tape of the operations on tensors while a model was built, and how to replay it for some tensors only.

Tensors are recorded as places in storages, so views need no entry. A backward pass over the tape finds the entries that a wanted
storage depends on. A forward pass runs these entries. Of the others it only draws the same random numbers again:

    empty A · uniform_ A · empty B · uniform_ B · normal_ A · normal_ B      wanted: B
              drawn                  drawn        drawn       run
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, UntypedStorage

from meshwright.capture.weights.skip_random import CHUNK, skip
from meshwright.capture.weights.torch_functions import NORMAL, UNIFORM


class How(Enum):
    """What happens to an entry when a tape is replayed."""

    RUN = "run"
    DRAW = "draw"
    SKIP = "skip"


class Place(NamedTuple):
    """A tensor as a part of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        found = 1
        for n in self.size:
            found *= n
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """One call, with the storages that it reads, changes and makes. `whole` means that it overwrites all of what it changes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    reads: frozenset[int]
    changes: frozenset[int]
    makes: tuple[Place | None, ...]
    draws: bool
    overwrites: bool
    whole: bool
    dtype: torch.dtype
    state: Tensor | None = None


@dataclass
class Tape:
    """All entries, the bytes of each storage, and the storages that existed before recording."""

    entries: list[Entry] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    given: dict[int, UntypedStorage] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Convert storages to tensors, because only tensors can be sent."""
        bare = {n: torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for n, s in self.given.items()}
        return {**self.__dict__, "given": bare}

    def __setstate__(self, state: dict[str, Any]) -> None:
        bare: dict[int, Tensor] = state["given"]
        self.__dict__.update(state, given={number: tensor.untyped_storage() for number, tensor in bare.items()})

    def play(self, wanted: Collection[int], seed: int, take: Callable[[int, UntypedStorage], None]) -> None:
        """Make the wanted storages with the values that a complete build from the seed would give.

        Each is given to `take` as soon as no later entry changes or reads it, and forgotten.
        """
        runs = self._needed(wanted)
        last = {storage: index for index, (_, touched) in enumerate(runs) for storage in touched}
        kept = torch.get_rng_state()
        before = {id(g): (g, g.get_state()) for e in self.entries if (g := e.kwargs.get("generator")) is not None}
        storages: dict[int, UntypedStorage] = {}
        changed = frozenset(number for e in self.entries for number in e.changes)
        player = _Player(storages, self.sizes, self.given, changed)
        torch.manual_seed(seed)
        try:
            with torch.no_grad():
                for index, (entry, (how, touched)) in enumerate(zip(self.entries, runs, strict=True)):
                    if how is How.RUN:
                        player.run(entry)
                    elif how is How.DRAW:
                        player.draw(entry)
                    for storage in touched:
                        if last[storage] == index:
                            if storage in wanted:
                                take(storage, player.storage(storage))
                            storages.pop(storage, None)
        finally:
            torch.set_rng_state(kept)
            for generator, state in before.values():
                generator.set_state(state)
        for storage in wanted:
            if storage not in last:  # no entry touches it: it existed before recording, or has no values
                take(storage, player.storage(storage))

    def _needed(self, wanted: Collection[int]) -> list[tuple[How, frozenset[int]]]:
        """Return what to do with each entry, and the storages that it touches."""
        drawn = [i for i, (how, _) in enumerate(self._backwards(wanted, 0)) if how is How.RUN and self.entries[i].draws]
        return self._backwards(wanted, drawn[-1] if drawn else 0)

    def _backwards(self, wanted: Collection[int], drawn: int) -> list[tuple[How, frozenset[int]]]:
        """The same, if draws before entry `drawn` matter and later draws do not."""
        live, found = set(wanted), []
        for index in reversed(range(len(self.entries))):
            entry, how = self.entries[index], How.SKIP
            touched: frozenset[int] = frozenset()
            made = frozenset(place.storage for place in entry.makes if place is not None)
            matters = entry.draws and index < drawn
            if (entry.changes | made) & live or (matters and not entry.overwrites):
                how, touched = How.RUN, entry.reads | entry.changes | made
                live -= made | (entry.changes if entry.whole else frozenset())
                live |= entry.reads | (frozenset() if entry.whole else entry.changes)
            elif matters:
                how, touched = How.DRAW, entry.reads
                live |= entry.reads
            found.append((how, touched))
        found.reverse()
        return found


@dataclass
class _Player:
    """Runs entries on real storages, which are allocated at their first use."""

    storages: dict[int, UntypedStorage]
    sizes: Mapping[int, int]
    given: Mapping[int, UntypedStorage]
    changed: Collection[int]

    def storage(self, number: int) -> UntypedStorage:
        """Return the current content of a storage. A storage from before recording is never changed."""
        if number not in self.storages:
            if number in self.given:
                given = self.given[number]
                self.storages[number] = given.clone() if number in self.changed else given
            else:
                self.storages[number] = torch.zeros(self.sizes[number], dtype=torch.uint8).untyped_storage()
        return self.storages[number]

    def tensor(self, place: Place) -> Tensor:
        """Return the current content of a tensor."""
        return at(self.storage(place.storage), place)

    def run(self, entry: Entry) -> None:
        """Run an entry."""
        if entry.name == UNFILLED_MARK:
            return
        result = self._call(entry, mapped(self.tensor, entry.args, Place), mapped(self.tensor, dict(entry.kwargs), Place))
        for place, tensor in zip(entry.makes, flat(result, Tensor), strict=False):
            if place is not None:
                found = tensor.untyped_storage()
                if found.nbytes() != self.sizes[place.storage]:
                    raise RuntimeError(f"{entry.name} made {found.nbytes()} bytes, but {self.sizes[place.storage]} were recorded")
                self.storages[place.storage] = found

    def draw(self, entry: Entry) -> None:
        """Draw the random numbers of an initialiser and discard them."""
        target = entry.args[0] if entry.args else next(iter(entry.kwargs.values()))
        kind = "uniform_" if entry.name in UNIFORM else "normal_" if entry.name in NORMAL else ""
        generator: Generator | None = entry.kwargs.get("generator")
        if kind and target.elements > 2 * CHUNK and _dense(target):
            self._set_state(entry)
            if skip(kind, target.elements, target.dtype, generator):
                return
        room = torch.empty_strided(target.size, target.stride, dtype=target.dtype)
        own: Callable[[Place], Tensor] = lambda place: room if place == target else self.tensor(place)  # noqa: E731
        self._call(entry, mapped(own, entry.args, Place), mapped(own, dict(entry.kwargs), Place))

    def _call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._set_state(entry)
        before = torch.get_default_dtype()
        torch.set_default_dtype(entry.dtype)
        try:
            return entry.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    @staticmethod
    def _set_state(entry: Entry) -> None:
        if entry.state is not None:
            (entry.kwargs.get("generator") or torch.default_generator).set_state(entry.state)


UNFILLED_MARK = "unfilled"
"""The name of entries that make a storage without values."""


def at(storage: UntypedStorage, place: Place) -> Tensor:
    """Return the tensor at a place in a storage."""
    return torch.empty(0, dtype=place.dtype, device=storage.device).set_(storage, place.offset, place.size, place.stride)


def mapped(function: Callable[[Any], Any], value: Any, kind: type) -> Any:
    """Return the arguments with every object of a type replaced."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, v, kind) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(function, v, kind) for v in value)
    if isinstance(value, dict):
        return {key: mapped(function, v, kind) for key, v in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(function, v, kind) for v in (value.start, value.stop, value.step)))
    return value


def flat(value: Any, kind: type) -> list[Any]:
    """Return all objects of a type among arguments or results."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    return [found for part in value for found in flat(part, kind)] if isinstance(value, tuple | list) else []


def _dense(place: Place) -> bool:
    """True if its elements are contiguous, in the order in which they are drawn."""
    expected = 1
    for n, step in zip(reversed(place.size), reversed(place.stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True
