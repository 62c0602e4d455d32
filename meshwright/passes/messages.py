"""Sends and receives, placed so that even blocking ones cannot get stuck.

Both ends of a message stand at one point of a linear order of everything: running the lists in that order never finds a
partner missing. "Send after the producer, receive before the reader" does not have this property.

The point is right after the producer, but not before the last but one message of the same channel (source, destination,
kind) has been read: so at most two wait unread at the receiver, and the value stays with its sender so long. A value
with several readers is handed on from reader to reader, after the one before has used it. Where a schedule orders a
channel itself, the channel takes part in the linear order like a worker, and its messages stand where it carries them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Entry, Kind, Op, Transfer, Value
from meshwright.ir.analysis.effects import CONSUMED, collective
from meshwright.ir.analysis.order import JOINT, Flow, Sweep, sweep
from meshwright.ir.schedule import Schedule

OUTSTANDING = 2
"""How many messages of a channel may wait unread at the receiver."""

Duration = Callable[[int, Entry], float]
Delay = Callable[[int, int, int], float]


def comm(schedule: Schedule, *, flow: Flow | None = None, duration: Duration | None = None, delay: Delay | None = None) -> Flow:
    """Add sends and receives to lists of compute, syncs and updates; times only choose among safe orders.

    The result is the lowered schedule with its effects: those of the entries are taken over, not asked for again.
    """
    flow = flow or Flow.of(schedule)
    carried = _with_channels(flow) if schedule.channels else flow
    order = sweep(carried, duration=duration, delay=delay)
    if order.stuck:
        raise stuck_error(schedule, carried, order)
    after = _messages(carried, order)
    lists: list[list[Entry]] = [[] for _ in schedule.lists]
    reads: list[list[tuple[int, ...]]] = [[] for _ in schedule.lists]
    writes: list[list[tuple[int, ...]]] = [[] for _ in schedule.lists]
    for position, (worker, index) in enumerate(order.sequence):
        if worker < len(lists):
            lists[worker].append(flow.lists[worker][index])
            reads[worker].append(flow.reads[worker][index])
            writes[worker].append(flow.writes[worker][index])
        for number, source, target in after.get(position, ()):
            value, just = flow.values[number], (number,)
            lists[source].append(Transfer(True, value, target))
            reads[source].append(just)
            writes[source].append(())
            lists[target].append(Transfer(False, value, source))
            reads[target].append(())
            writes[target].append(just)
    lowered = replace(schedule.with_lists(tuple(map(tuple, lists))), lowered=True)
    return Flow(lowered, lowered.lists, reads, writes, flow.initial, flow.ids, flow.values)


def _messages(flow: Flow, order: Sweep) -> dict[int, list[tuple[int, int, int]]]:
    """For each position of the linear order the messages (value, source, target) that stand right behind it."""
    read_at: dict[tuple[int, int, Kind], list[int]] = {}
    after: dict[int, list[tuple[int, int, int]]] = {}
    for produced, value, source, target, read in _hops(flow, order):
        reads = read_at.setdefault((source, target, flow.values[value].kind), [])
        point = max(produced, reads[-OUTSTANDING]) if len(reads) >= OUTSTANDING else produced
        if point >= read:  # one action reads more of this channel than may wait
            point = produced
        reads.append(read)
        after.setdefault(point, []).append((value, source, target))
    for position, (worker, index) in enumerate(order.sequence):
        if worker >= flow.schedule.workers:
            message = flow.lists[worker][index]
            assert isinstance(message, Transfer)
            ends = flow.schedule.channels[worker - flow.schedule.workers].workers
            source = ends[0] if message.peer == ends[1] else ends[1]
            after.setdefault(position, []).append((flow.reads[worker][index][0], source, message.peer))
    return after


def _hops(flow: Flow, order: Sweep) -> list[tuple[int, int, int, int, int]]:
    """Every message as (position of who has it, value, source, target, position of its first reader there), by reader."""
    holder: list[int] = [-1] * len(flow.values)
    since: list[int] = [0] * len(flow.values)
    made: list[int] = [0] * len(flow.values)
    relayed = [value.kind not in CONSUMED and value.kind is not Kind.PARAM for value in flow.values]
    others: dict[int, set[int]] = {}
    hops = []
    workers = flow.schedule.workers
    for worker, values in enumerate(flow.initial):
        for value in values:
            holder[value] = worker
    ends: list[list[int]] = [[0] * len(entries) for entries in flow.lists]
    for position, (worker, index) in enumerate(order.sequence):
        ends[worker][index] = position
    together: dict[Entry, int] = {}
    for position, (worker, index) in enumerate(order.sequence):
        entry = flow.lists[worker][index]
        joint = type(entry) is Action and entry.op in JOINT and len(collective(flow.schedule, entry)) > 1
        read = together.setdefault(entry, position) if joint else position
        for value in flow.reads[worker][index]:
            source = holder[value]
            if source != worker and source < workers and worker < workers:
                had = others.setdefault(value, {source})
                if worker not in had:
                    hops.append((since[value] if since[value] < read else made[value], value, source, worker, read))
                    had.add(worker)
            if relayed[value] and not joint:  # a collective has no before and after among its members
                holder[value], made[value] = worker, position
                since[value] = ends[worker][_last_use(flow, worker, index)]
        for value in flow.writes[worker][index]:
            holder[value], made[value], since[value] = worker, position, position
    return hops


def _last_use(flow: Flow, worker: int, index: int) -> int:
    """The index behind which a reader hands a value on: an update's own forward comes first."""
    entries = flow.lists[worker]
    if index + 1 < len(entries) and isinstance(update := entries[index], Action) and update.op is Op.U:
        behind = entries[index + 1]
        if isinstance(behind, Action) and behind.op is Op.F and behind.stage == update.stage:
            return index + 1
    return index


def _with_channels(flow: Flow) -> Flow:
    """The flow with a list per ordered channel, which turns a value at its producer into one at its reader."""
    schedule, placement = flow.schedule, flow.schedule.placement
    lists, reads, writes, values = list(flow.lists), list(flow.reads), list(flow.writes), list(flow.values)
    for channel in schedule.channels:
        row: list[Entry] = []
        row_reads: list[tuple[int, ...]] = []
        row_writes: list[tuple[int, ...]] = []
        for producer in channel.producers:
            forward = producer.op is Op.F
            boundary, reader = (producer.stage, producer.stage + 1) if forward else (producer.stage - 1, producer.stage - 1)
            value = Value(Kind.ACT if forward else Kind.GRAD, boundary, producer.mb, producer.replica, 0, producer.part)
            target = placement.team(producer.replica, reader, producer.mb)[0]
            if value not in flow.ids or target not in channel.workers:
                raise MeshwrightError(f"{schedule.name}: the channel {channel.workers} cannot carry the output of {producer}")
            number, arrived = flow.ids[value], len(values)
            values.append(value)
            row.append(Transfer(True, value, target))
            row_reads.append((number,))
            row_writes.append((arrived,))
            reads[target] = [tuple(arrived if n == number else n for n in ids) if number in ids else ids for ids in reads[target]]
        lists.append(tuple(row))
        reads.append(row_reads)
        writes.append(row_writes)
    return Flow(schedule, tuple(lists), reads, writes, flow.initial, flow.ids, values)


class StuckError(MeshwrightError):
    """A schedule whose lists wait for each other; `entry` on `worker` is one that waits, in lists that lowering has added to."""

    def __init__(self, what: str, worker: int, entry: Entry, schedule: Schedule) -> None:
        super().__init__(what, fix="meshwright check shows the place on a grid")
        self.worker, self.entry, self.schedule = worker, entry, schedule


def stuck_error(schedule: Schedule, flow: Flow, order: Sweep) -> StuckError:
    """What a schedule that cannot run to its end waits for."""
    stuck = {worker: index for worker, index in order.stuck.items() if worker < schedule.workers}
    worker, index = min(stuck.items(), key=lambda item: (item[1], item[0]))
    entry = schedule.lists[worker][index]
    reason = f"waits for {flow.values[order.missing[worker]]}" if worker in order.missing else "waits for its partners"
    return StuckError(f"{schedule.name} cannot run: worker {worker} stops at {entry}, which {reason}", worker, entry, schedule)
