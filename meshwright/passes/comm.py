"""Sends and receives, placed so that even blocking ones cannot get stuck.

Both ends of a message stand at one point of a linear order of everything: running the lists in that order never finds a
partner missing. "Send after the producer, receive before the reader" does not have this property.

The point is right after the producer, unless two messages of the same channel (source, destination, kind) would then
wait unread at the receiver: in that case it moves behind the reader of the one before the last, and the value stays with
its sender so long. A value with several readers is handed on from reader to reader, after the one before has used it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Entry, Kind, Transfer, Value
from meshwright.ir.order import Flow, Place, Sweep, sweep
from meshwright.ir.schedule import Schedule

OUTSTANDING = 2
"""How many messages of a channel may wait unread at the receiver."""

Duration = Callable[[int, Entry], float]
Delay = Callable[[int, int, int], float]


def comm(
    schedule: Schedule, *, flow: Flow | None = None, duration: Duration | None = None, delay: Delay | None = None
) -> Schedule:
    """Add sends and receives to lists of compute, syncs and updates; times only choose among safe orders."""
    flow = flow or Flow(schedule)
    order = sweep(flow, duration=duration, delay=delay)
    if order.stuck:
        raise stuck_error(schedule, flow, order)
    after = _messages(flow, order)
    lists: list[list[Entry]] = [[] for _ in schedule.lists]
    for position, (worker, index) in enumerate(order.sequence):
        lists[worker].append(schedule.lists[worker][index])
        for value, source, target in after.get(position, ()):
            lists[source].append(Transfer(True, value, target))
            lists[target].append(Transfer(False, value, source))
    return replace(
        schedule, prologue=(), drain=(), repeats=1, period=tuple(map(tuple, lists)), turns=schedule.turn_edges, lowered=True
    )


def _messages(flow: Flow, order: Sweep) -> dict[int, list[tuple[Value, int, int]]]:
    """For each position of the linear order the messages (value, source, target) that stand right behind it."""
    hops = _hops(flow, order)
    read_at: dict[tuple[int, int, Kind], list[int]] = defaultdict(list)
    after: dict[int, list[tuple[Value, int, int]]] = defaultdict(list)
    for produced, value_id, source, target, read in sorted(hops):
        value = flow.values[value_id]
        reads = read_at[source, target, value.kind]
        point = max(produced, reads[-OUTSTANDING]) if len(reads) >= OUTSTANDING else produced
        if point >= read:
            point = produced
        reads.append(read)
        after[point].append((value, source, target))
    return after


def _hops(flow: Flow, order: Sweep) -> list[tuple[int, int, int, int, int]]:
    """Every message as (position of who has it, value, source, target, position of its first reader there)."""
    holder: dict[int, tuple[int, int]] = {}
    held: set[tuple[int, int]] = set()
    hops = []
    for worker, values in enumerate(flow.initial):
        held.update((value, worker) for value in values)
    for position, (worker, index) in enumerate(order.sequence):
        for value in flow.reads[worker][index]:
            if (value, worker) not in held and value in holder:
                source, since = holder[value]
                hops.append((since, value, source, worker, position))
                held.add((value, worker))
            holder[value] = (worker, position)
        for value in flow.writes[worker][index]:
            held.add((value, worker))
            holder[value] = (worker, position)
    return hops


class StuckError(MeshwrightError):
    """A schedule whose lists wait for each other; `place` is where."""

    def __init__(self, what: str, place: Place) -> None:
        super().__init__(what, fix="meshwright check shows the place on a grid")
        self.place = place


def stuck_error(schedule: Schedule, flow: Flow, order: Sweep) -> StuckError:
    """What a schedule that cannot run to its end waits for."""
    worker, index = min(order.stuck.items(), key=lambda item: (item[1], item[0]))
    entry = schedule.lists[worker][index]
    reason = f"waits for {flow.values[order.missing[worker]]}" if worker in order.missing else "waits for its partners"
    return StuckError(f"{schedule.name} cannot run: worker {worker} stops at {entry}, which {reason}", (worker, index))
