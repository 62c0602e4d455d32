"""Unlowered lists as arrays, for the quick sweep: what each entry reads from another worker, and what it sends.

Lowering a large schedule takes seconds. A search over plans only needs its times, and these follow from far less: values that
cross from one stage to the next, and reductions. Entries that differ only in their microbatch have the same effects, so
`analysis/effects.py` is asked once for each kind of entry; there is no second dependency rule here.

This works for a schedule with a flush whose stages have one worker each and which places no syncs itself. `fits` says so; the
plain engine simulates all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.action import COMPUTE, Action, Cell, Entry, Kind, Op, Value, actions
from meshwright.ir.analysis.effects import rule
from meshwright.ir.schedule import Schedule, Sharding

Ints = NDArray[np.int64]
CROSSING = (Kind.ACT, Kind.GRAD)


class Slot(NamedTuple):
    """A kind of value that crosses a boundary between stages; one value for each microbatch."""

    value: Value
    source: int
    target: int


@dataclass
class Listing:
    """One list as columns; ids of values are slot x microbatches + microbatch, -1 for none."""

    class_of: list[int] = field(default_factory=list)
    microbatch: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class QuickLists:
    """The lists of a schedule: for each worker the class of each entry, what it reads and writes, and examples of classes."""

    schedule: Schedule
    examples: list[tuple[int, Entry]]
    classes: list[Ints]
    reads: list[Ints]
    writes: list[Ints]
    slots: list[Slot]
    microbatches: int
    last_gradients: list[dict[int, list[int]]]
    """For each worker and unit the places in its list that make a gradient."""

    @cached_property
    def joined(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Where each list begins, and classes, reads and writes of all lists, one after the other."""
        return (*joined(self.classes), np.concatenate(self.reads), np.concatenate(self.writes))


def fits(schedule: Schedule) -> bool:
    """True if the quick sweep can run a schedule; its lists are looked at by `quick_lists`."""
    whole = schedule.flush and schedule.repeats == 1 and not schedule.prologue and not schedule.drain and not schedule.first
    plain = not schedule.lowered and not schedule.turns and not schedule.owners and not schedule.ring
    return schedule.placement.single and whole and plain and schedule.sharding is not Sharding.PARAMETERS


def quick_lists(schedule: Schedule) -> QuickLists | None:
    """Returns the lists as arrays; None if they have entries that only the plain engine can treat."""
    if not fits(schedule):
        return None
    known: dict[tuple[object, ...], int] = {}
    examples: list[tuple[int, Entry]] = []
    listings: list[Listing] = []
    for worker, entries in enumerate(schedule.period):
        listing = Listing()
        classes, microbatches = listing.class_of, listing.microbatch
        for entry in entries:
            key, pair = _key(entry)
            if key is None:
                return None
            number = known.get(key)
            if number is None:
                number = known[key] = len(examples)
                examples.append((worker, entry))
            classes.append(number)
            microbatches.append(pair)
        listings.append(listing)
    if not any(a.op is not Op.F for _, entry in examples for a in actions(entry)):
        return None  # forwards only
    return _with_values(schedule, examples, listings)


def _key(entry: Entry) -> tuple[tuple[object, ...] | None, tuple[int, int]]:
    """Returns everything that defines an entry except its microbatch, and the microbatches of its one or two actions."""
    if type(entry) is Action:
        op, stage, mb, replica, version, part = entry
        return ((op, stage, replica, part) if op in COMPUTE and not version else None), (mb, mb)
    if type(entry) is Cell:
        (a, b) = entry
        if a.op not in COMPUTE or b.op not in COMPUTE or a.version or b.version:
            return None, (0, 0)
        return (a.op, a.stage, a.replica, a.part, b.op, b.stage, b.replica, b.part), (a.mb, b.mb)
    return None, (0, 0)


def _with_values(schedule: Schedule, examples: list[tuple[int, Entry]], listings: list[Listing]) -> QuickLists | None:
    """Adds what entries read and write: the rule is asked for one entry of each class."""
    few: list[list[Entry]] = [[] for _ in listings]
    for worker, entry in examples:
        few[worker].append(entry)
    effects = rule(schedule.with_lists(tuple(map(tuple, few))))
    slots: dict[tuple[object, ...], int] = {}
    found: list[Slot] = []
    reads, writes = np.full((len(examples), 2), -1, np.int64), np.full((len(examples), 2), -1, np.int64)
    for number, (worker, entry) in enumerate(examples):
        for action, column in zip(actions(entry), (0, 1), strict=False):
            effect = effects(worker, action)
            for table, values in ((reads, effect.reads), (writes, effect.writes)):
                crossing = [value for value in values if value.kind in CROSSING]
                if len(crossing) > 1 or any(value.mb != action.mb for value in crossing):
                    return None
                for value in crossing:
                    key = (value.kind, value.stage, value.replica, value.part)
                    if key not in slots:
                        slots[key] = len(found)
                        found.append(_slot(schedule, value))
                    table[number, column] = slots[key]
    count = 1 + max(mb for listing in listings for pair in listing.microbatch for mb in pair)
    return _columns(schedule, examples, listings, (reads, writes), found, count)


def _slot(schedule: Schedule, value: Value) -> Slot:
    before, after = (schedule.placement.team(value.replica, value.stage + k, value.mb)[0] for k in (0, 1))
    return Slot(value, before, after) if value.kind is Kind.ACT else Slot(value, after, before)


def _columns(
    schedule: Schedule,
    examples: list[tuple[int, Entry]],
    listings: list[Listing],
    tables: tuple[Ints, Ints],
    slots: list[Slot],
    count: int,
) -> QuickLists:
    classes: list[Ints] = []
    reads: list[Ints] = []
    writes: list[Ints] = []
    gradients: list[dict[int, list[int]]] = []
    units: list[tuple[int, ...]] = [
        tuple(unit for a in actions(entry) if a.op in (Op.B, Op.W) for unit in schedule.units_of[a.stage])
        for _, entry in examples
    ]
    for listing in listings:
        of = np.array(listing.class_of, np.int64)
        mbs = np.array(listing.microbatch, np.int64).reshape(-1, 2)
        classes.append(of)
        for table, into in zip(tables, (reads, writes), strict=True):
            picked = table[of]
            into.append(np.where(picked < 0, -1, picked * count + mbs))
        places: dict[int, list[int]] = {}
        for index, number in enumerate(listing.class_of):
            for unit in units[number]:
                places.setdefault(unit, []).append(index)
        gradients.append(places)
    return QuickLists(schedule, examples, classes, reads, writes, slots, count, gradients)


def joined(arrays: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Returns arrays one after the other, and where each begins."""
    first = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
    return first, np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
