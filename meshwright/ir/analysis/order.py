"""Linear orders of a schedule: one sweep over the effects, and a run in which every send and receive blocks.

`sweep` lets each worker advance through its list as soon as its inputs exist anywhere. Sorted by end time, the result is the
linear order in which communication is placed: an entry that is still running when a message is sent comes after the message
in both lists. (Lists beyond the workers' lists are channels; their messages are sorted by when they are sent.)
`rendezvous` runs a lowered schedule with blocking sends and receives. It returns a linear order, or names which worker waits
for which.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.ir.action import Action, Cell, Entry, Op, Transfer, Value
from meshwright.ir.analysis.effects import collective, rule
from meshwright.ir.analysis.held_values import initial
from meshwright.ir.schedule import Lists, Schedule

Place = tuple[int, int]
"""(worker, index in its list)."""

SLOTS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0, Op.R: 1.0}
"""Default durations: a backward takes twice as long as a forward."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector. It would scan the tuples of a large schedule many times, and they contain no cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


JOINT = (Op.S, Op.N, Op.G)
"""Ops that a group of workers may have to issue together."""


def slots(entry: Entry) -> float:
    """Returns the duration of an entry in unit slots."""
    if isinstance(entry, Action):
        time = SLOTS.get(entry.op, 0.0)
        return time if entry.part < 0 else time / 2
    return slots(entry.first) + slots(entry.second) if isinstance(entry, Cell) else 0.0


@dataclass(frozen=True)
class Flow:
    """The effects of all entries, computed once, with values interned as numbers."""

    schedule: Schedule
    lists: Lists
    reads: list[list[tuple[int, ...]]]
    writes: list[list[tuple[int, ...]]]
    initial: list[tuple[int, ...]]
    ids: dict[Value, int]
    values: list[Value]

    @classmethod
    def of(cls, schedule: Schedule) -> Flow:
        """Applies the rule once to every entry."""
        ids: dict[Value, int] = {}
        effects = rule(schedule)
        reads: list[list[tuple[int, ...]]] = []
        writes: list[list[tuple[int, ...]]] = []
        number = ids.setdefault
        start = [tuple([number(v, len(ids)) for v in initial(schedule, w)]) for w in range(schedule.workers)]
        for worker, entries in enumerate(schedule.lists):
            both = [effects(worker, entry) for entry in entries]
            reads.append([tuple([number(value, len(ids)) for value in effect[0]]) for effect in both])
            writes.append([tuple([number(value, len(ids)) for value in effect[1]]) for effect in both])
        return cls(schedule, schedule.lists, reads, writes, start, ids, list(ids))


@dataclass(frozen=True)
class Sweep:
    """Start and end of every entry in a sweep, all places sorted by end, and where workers are stuck."""

    sequence: list[Place]
    start: list[list[float]]
    end: list[list[float]]
    stuck: dict[int, int]
    missing: dict[int, int]


def sweep(
    flow: Flow, *, duration: Callable[[int, Entry], float] | None = None, delay: Callable[[int, int, int], float] | None = None
) -> Sweep:
    """Run every list as soon as inputs exist; `delay(value, writer, reader)` is a value's travel time between workers."""
    run = _Run(flow, duration or (lambda _, entry: slots(entry)), delay)
    while run.ready:
        run.advance(run.ready.pop())
    return run.result()


class _Run:
    """The state of a sweep: when and on which worker each value exists, and which worker waits for what."""

    def __init__(
        self, flow: Flow, duration: Callable[[int, Entry], float], delay: Callable[[int, int, int], float] | None
    ) -> None:
        self.flow, self.duration, self.delay = flow, duration, delay
        self.workers = flow.schedule.workers
        self.time: list[float] = [-1.0] * len(flow.values)
        self.home: list[int] = [-1] * len(flow.values)
        for worker, values in enumerate(flow.initial):
            for value in values:
                self.time[value], self.home[value] = 0.0, worker
        self.start: list[list[float]] = [[] for _ in flow.lists]
        self.end: list[list[float]] = [[] for _ in flow.lists]
        self.free = [0.0] * len(flow.lists)
        self.sequence: list[tuple[float, int, Place]] = []
        self.waiting: dict[int, list[int]] = {}
        self.arrived: dict[Action, list[int]] = {}
        self.missing: dict[int, int] = {}
        self.ready = list(range(len(flow.lists) - 1, -1, -1))

    def advance(self, worker: int) -> None:
        """Advances a worker until a value or a partner is missing."""
        entries, reads = self.flow.lists[worker], self.flow.reads[worker]
        index = len(self.start[worker])
        while index < len(entries):
            at = self._inputs(worker, reads[index])
            if at < 0.0:
                return
            entry = entries[index]
            if type(entry) is Action and entry.op in JOINT and len(group := collective(self.flow.schedule, entry)) > 1:
                if not self._meet(worker, entry, len(group), at):
                    return
            else:
                self._run(worker, index, at)
            index += 1

    def _inputs(self, worker: int, reads: tuple[int, ...]) -> float:
        """Returns when a worker is free and has all these values; negative if one does not exist yet."""
        at, time, delay = self.free[worker], self.time, self.delay
        for value in reads:
            if (made := time[value]) < 0.0:
                self.waiting.setdefault(value, []).append(worker)
                self.missing[worker] = value
                return -1.0
            if delay is not None and self.home[value] != worker:
                made += delay(value, self.home[value], worker)
            if made > at:
                at = made
        return at

    def _meet(self, worker: int, entry: Action, count: int, at: float) -> bool:
        """Registers a worker at a collective; the last member to arrive runs it for all."""
        self.free[worker] = at
        here = self.arrived.setdefault(entry, [])
        here.append(worker)
        if len(here) < count:
            self.missing.pop(worker, None)
            return False
        together = max(self.free[member] for member in here)
        for member in here:
            self._run(member, len(self.start[member]), together)
        self.ready.extend(member for member in here if member != worker)
        return True

    def _run(self, worker: int, index: int, at: float) -> None:
        finish = at + self.duration(worker, self.flow.lists[worker][index])
        self.start[worker].append(at)
        self.end[worker].append(finish)
        self.free[worker] = finish
        self.sequence.append((finish if worker < self.workers else at, len(self.sequence), (worker, index)))
        for value in self.flow.writes[worker][index]:
            self.time[value] = finish
            self.home[value] = worker
            if value in self.waiting:
                self.ready.extend(self.waiting.pop(value))

    def result(self) -> Sweep:
        """Returns the order by end, and where workers are stuck."""
        self.sequence.sort()
        counts = ((worker, len(started)) for worker, started in enumerate(self.start))
        stuck = {worker: count for worker, count in counts if count < len(self.flow.lists[worker])}
        return Sweep([place for _, _, place in self.sequence], self.start, self.end, stuck, self.missing)


@dataclass(frozen=True)
class Blocked:
    """Where a rendezvous run stopped: each stuck worker's index, and the workers it waits for."""

    at: dict[int, int]
    waits_for: dict[int, tuple[int, ...]]


def rendezvous(schedule: Schedule) -> tuple[list[tuple[Place, ...]], Blocked | None]:
    """Run lowered lists with blocking sends, receives and collectives. Returns the events in order, and where it is stuck.

    An event is one place, the two ends of a message (sender first), or all members of a collective. The result does not
    depend on the order in which workers are tried: each worker has exactly one next entry, and partners are fixed.
    """
    lists = schedule.lists
    at = [0] * len(lists)
    events: list[tuple[Place, ...]] = []
    ready = list(range(len(lists) - 1, -1, -1))
    while ready:
        worker = ready.pop()
        entries = lists[worker]
        index = at[worker]
        while index < len(entries):
            entry = entries[index]
            partners: tuple[int, ...] | None
            if type(entry) is Transfer:
                partners = _ends(lists, at, worker, entry)
            elif type(entry) is Action and entry.op in JOINT:
                partners = _members(schedule, lists, at, worker, entry)
            else:
                partners = ()
            if partners is None:
                break
            if partners:
                events.append(tuple([(member, at[member]) for member in partners]))
                for member in partners:
                    at[member] += 1
                ready.extend(member for member in partners if member != worker)
                index = at[worker]
            else:
                events.append(((worker, index),))
                index += 1
                at[worker] = index
    stuck = {worker: index for worker, index in enumerate(at) if index < len(lists[worker])}
    if not stuck:
        return events, None
    return events, Blocked(stuck, {w: _awaited(schedule, lists, at, w) for w in stuck})


def _ends(lists: Lists, at: Sequence[int], worker: int, entry: Transfer) -> tuple[int, ...] | None:
    """Returns sender and receiver of a message if the peer has reached the other end; otherwise None."""
    peer = entry.peer
    if peer >= len(lists) or at[peer] >= len(lists[peer]):
        return None
    other = lists[peer][at[peer]]
    if type(other) is not Transfer or other.peer != worker or other.sends == entry.sends or other.value != entry.value:
        return None
    return (worker, peer) if entry.sends else (peer, worker)


def _members(schedule: Schedule, lists: Lists, at: Sequence[int], worker: int, entry: Action) -> tuple[int, ...] | None:
    """Returns the group of a collective if all members have reached it, else None; () if the worker runs it alone."""
    group = collective(schedule, entry)
    if len(group) < 2 or worker not in group:
        return ()
    return group if all(at[m] < len(lists[m]) and lists[m][at[m]] == entry for m in group) else None


def _awaited(schedule: Schedule, lists: Lists, at: Sequence[int], worker: int) -> tuple[int, ...]:
    entry = lists[worker][at[worker]]
    if isinstance(entry, Transfer):
        return (entry.peer,)
    group = collective(schedule, entry) if isinstance(entry, Action) else ()
    return tuple(m for m in group if m != worker and not (at[m] < len(lists[m]) and lists[m][at[m]] == entry))
