"""A lowered schedule as a graph of events in a fixed order, so that for given costs only one sweep is needed.

A node is a compute entry on its worker, a message on its link, or a collective of its group. It starts when everything it
waits for is ready:

    compute     the previous entry of the worker; the messages and collectives that deliver what it reads
    message     the entries before its send on the sender; the previous message on the link (half duplex: in either
                direction, in the order of the lists); the message that delivered the value, if it is passed on
    collective  the entries before it on every member, and each member's previous collective

The receiver does not delay a message, because receives are posted ahead. Nodes with the same cost share a class.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Action, Entry, Transfer, Value
from meshwright.ir.analysis.effects import collective
from meshwright.ir.analysis.order import JOINT, Flow, Place, rendezvous
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Duplex
from meshwright.ir.schedule import Schedule


class Message(NamedTuple):
    """A value that is sent from one worker to another."""

    value: Value
    source: int
    target: int


class EventGraph:
    """Nodes in an order in which each comes after everything it waits for."""

    def __init__(self, flow: Flow, duplex: Duplex = Duplex.FULL, events: list[tuple[Place, ...]] | None = None) -> None:
        schedule = flow.schedule
        self.schedule = schedule
        self.duplex = duplex
        self.flow = flow
        self.places: list[tuple[Place, ...]] = []
        self.waits: list[list[int]] = []
        self.link_before: list[int] = []
        self.class_of: list[int] = []
        self.classes: list[tuple[int, Entry | Message]] = []
        self._classes: dict[Hashable, int] = {}
        self._compute: list[int] = [-1] * schedule.workers
        self._collective: list[int] = [-1] * schedule.workers
        self._brought: list[dict[int, int]] = [{} for _ in range(schedule.workers)]
        self._link: dict[tuple[int, int], int] = {}
        self._narrow = schedule.placement.narrow
        for event in events if events is not None else _run(schedule):
            self._add(event)

    def _add(self, event: tuple[Place, ...]) -> None:
        worker, index = event[0]
        entry = self.flow.lists[worker][index]
        if isinstance(entry, Transfer):
            self._add_message(event, entry)
        elif isinstance(entry, Action) and entry.op in JOINT and collective(self.schedule, entry):
            self._add_collective(event, entry)
        else:
            self._compute[worker] = self._node(event, self._class(worker, entry), self._inputs(worker, index))

    def _add_message(self, event: tuple[Place, ...], entry: Transfer) -> None:
        (source, index), (target, _) = event
        message = Message(entry.value, source, target)
        link = (source, target) if self.duplex is Duplex.FULL else (min(source, target), max(source, target))
        before = self._link.get(link, -1)
        node = self._node(event, self._class_of_message(message), self._inputs(source, index), before)
        self._link[link] = node
        self._brought[target][self.flow.reads[source][index][0]] = node

    def _add_collective(self, event: tuple[Place, ...], entry: Action) -> None:
        group = collective(self.schedule, entry)
        waits: list[int] = []
        node = self._node(event, self._class(event[0][0], entry), waits)
        for member, index in event:
            waits += self._inputs(member, index)
            if self._collective[member] >= 0:
                waits.append(self._collective[member])
            self._collective[member] = node
            for value in self.flow.writes[member][index]:
                self._brought[member][value] = node
        assert len(group) == len(event)

    def _inputs(self, worker: int, index: int) -> list[int]:
        """Returns the previous computation of the worker, and the nodes that deliver the values an entry reads."""
        brought = self._brought[worker]
        waits = [brought[value] for value in self.flow.reads[worker][index] if value in brought]
        if self._compute[worker] >= 0:
            waits.append(self._compute[worker])
        return waits

    def _node(self, event: tuple[Place, ...], class_: int, waits: list[int], link_before: int = -1) -> int:
        self.places.append(event)
        self.waits.append(waits)
        self.link_before.append(link_before)
        self.class_of.append(class_)
        return len(self.places) - 1

    def _class(self, worker: int, entry: Entry) -> int:
        key: Hashable
        if self._narrow and isinstance(entry, Action):
            key = (entry.op, entry.stage, entry.part != NONE)
        elif self._narrow:
            key = tuple((a.op, a.stage, a.part != NONE) for a in entry)  # type: ignore[union-attr]
        else:
            key = (worker, str(entry))
        return self._intern(key, (worker, entry))

    def _class_of_message(self, message: Message) -> int:
        value, source, target = message
        rows = value.piece if self._narrow else (value.piece, value.mb)
        key = (value.kind, value.stage, value.part != NONE, rows, source, target)
        return self._intern(key, (source, message))

    def _intern(self, key: Hashable, example: tuple[int, Entry | Message]) -> int:
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = len(self.classes)
            self.classes.append(example)
        return found

    def table(self, price: Price) -> list[tuple[float, float]]:
        """Returns for each class how long its nodes occupy their lane, and the latency after that."""
        return [
            price.message_s(*what) if isinstance(what, Message) else (price.entry_s(worker, what), 0.0)
            for worker, what in self.classes
        ]


def _run(schedule: Schedule) -> list[tuple[Place, ...]]:
    """Returns an order of all entries in which nothing waits for what comes later."""
    events, blocked = rendezvous(schedule)
    if blocked is not None:
        worker, index = next(iter(blocked.at.items()))
        raise MeshwrightError(
            f"{schedule.name} deadlocks: worker {worker} waits at {schedule.lists[worker][index]}",
            fix="meshwright check shows the cycle",
        )
    return events


def sweep(program: EventGraph, table: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The plain engine: returns the start of every node, and the time when its output is available."""
    starts: list[float] = []
    ready: list[float] = []
    free: list[float] = []
    for waits, before, class_ in zip(program.waits, program.link_before, program.class_of, strict=True):
        start = free[before] if before >= 0 else 0.0
        for node in waits:
            if ready[node] > start:
                start = ready[node]
        busy, latency = table[class_]
        starts.append(start)
        free.append(start + busy)
        ready.append(start + busy + latency)
    return starts, ready
