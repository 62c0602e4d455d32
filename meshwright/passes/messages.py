"""Places sends and receives so that even blocking ones cannot deadlock.

Both ends of a message are placed at one point of a linear order of all entries. Running the lists in that order never finds a
partner missing. "Send after the producer, receive before the reader" does not have this property.

The point is right after the producer, but not before the second to last message of the same channel (source, target, kind)
has been read. So at most two messages wait unread at the receiver, and until then the value stays on its sender. A value with
several readers is passed on from reader to reader, after the previous one has used it. An initial value, which nobody has used
before, is sent while its reader runs the action before. If a schedule orders a channel itself,
the channel takes part in the linear order like a worker, and its messages are placed where it carries them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.ir.action import COMPUTE, NONE, Action, Entry, Kind, Op, Transfer, Value, actions
from meshwright.ir.analysis.effects import CONSUMED, collective
from meshwright.ir.analysis.order import JOINT, Flow, Sweep, sweep
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import ChannelOrder, Schedule

START = -1
"""The position before all entries, where only initial values exist."""

OUTSTANDING = 2
"""The most messages of a channel that may wait unread at the receiver."""

Duration = Callable[[int, Entry], float]
Delay = Callable[[int, int, int], float]


def comm(schedule: Schedule, *, flow: Flow | None = None, duration: Duration | None = None, delay: Delay | None = None) -> Flow:
    """Adds sends and receives to lists of compute, syncs and updates. Times only choose among safe orders.

    Returns the lowered schedule with its effects. The effects of existing entries are reused, not recomputed.
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
    for position, (worker, index) in [(START, (len(lists), 0)), *enumerate(order.sequence)]:
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
    """For each position of the linear order, the messages (value, source, target) placed right after it."""
    read_at: dict[tuple[int, int, Kind], list[int]] = {}
    after: dict[int, list[tuple[int, int, int]]] = {}
    for produced, value, source, target, read in _hops(flow, order):
        reads = read_at.setdefault((source, target, flow.values[value].kind), [])
        point = max(produced, reads[-OUTSTANDING]) if len(reads) >= OUTSTANDING else produced
        if point >= read:  # one action reads more messages of this channel than may wait
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
    """Every message as (position where it is available, value, source, target, position of its first reader), by reader."""
    holder: list[int] = [-1] * len(flow.values)
    since: list[int] = [0] * len(flow.values)
    made: list[int] = [0] * len(flow.values)
    stays = frozenset() if flow.schedule.owners else {Kind.PARAM}
    relayed = [value.kind not in CONSUMED and value.kind not in stays for value in flow.values]
    others: dict[int, set[int]] = {}
    hops = []
    workers = flow.schedule.workers
    for worker, values in enumerate(flow.initial):
        for value in values:
            holder[value], made[value], since[value] = worker, START, START
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
                    point = since[value] if since[value] < read else made[value]
                    point = _just_before(flow, ends, worker, index) if point == START else point
                    hops.append((point, value, source, worker, read))
                    had.add(worker)
            if relayed[value] and not joint:  # the members of a collective have no order among themselves
                holder[value], made[value] = worker, position
                since[value] = ends[worker][_last_use(flow, worker, index)]
        for value in flow.writes[worker][index]:
            holder[value], made[value], since[value] = worker, position, position
    return hops


def _just_before(flow: Flow, ends: list[list[int]], worker: int, index: int) -> int:
    """Returns the position at which a worker starts its last computation before an entry."""
    entries = flow.lists[worker]
    computes = (i for i in reversed(range(index)) if any(action.op in COMPUTE for action in actions(entries[i])))
    next(computes, None)
    return ends[worker][before] if (before := next(computes, START)) != START else START


def _last_use(flow: Flow, worker: int, index: int) -> int:
    """Returns the index after which a reader passes a value on: after an update, its own forward runs first."""
    entries = flow.lists[worker]
    if index + 1 < len(entries) and isinstance(update := entries[index], Action) and update.op is Op.U:
        following = entries[index + 1]
        if isinstance(following, Action) and following.op is Op.F and following.stage == update.stage:
            return index + 1
    return index


def _with_channels(flow: Flow) -> Flow:
    """Returns the flow with one more list per ordered channel, which moves a value from its producer to its reader."""
    schedule = flow.schedule
    lists, reads, writes, values = list(flow.lists), list(flow.reads), list(flow.writes), list(flow.values)
    arrivals: list[dict[int, int]] = [{} for _ in lists]
    for channel in schedule.channels:
        row: list[Entry] = []
        row_reads: list[tuple[int, ...]] = []
        row_writes: list[tuple[int, ...]] = []
        for producer in channel.producers:
            value, target = _carried(channel, producer, schedule.placement)
            if value is None or value not in flow.ids:
                raise MeshwrightError(f"{schedule.name}: the channel {channel.workers} cannot carry the output of {producer}")
            number, arrived = flow.ids[value], len(values)
            values.append(value)
            row.append(Transfer(True, value, target))
            row_reads.append((number,))
            row_writes.append((arrived,))
            arrivals[target][number] = arrived
        lists.append(tuple(row))
        reads.append(row_reads)
        writes.append(row_writes)
    for target, changed in enumerate(arrivals):
        if changed:
            reads[target] = [tuple(changed.get(number, number) for number in ids) for ids in reads[target]]
    return Flow(schedule, tuple(lists), reads, writes, flow.initial, flow.ids, values)


def _carried(channel: ChannelOrder, producer: Action, placement: Placement) -> tuple[Value | None, int]:
    """Returns the value that a channel carries after an action, None if there is none, and the worker that it goes to."""
    forward = producer.op is Op.F
    kind, boundary = (Kind.ACT, producer.stage) if forward else (Kind.GRAD, producer.stage - 1)
    teams = [placement.team(producer.replica, boundary + k, producer.mb) for k in (0, 1)]
    for piece, first, second in placement.pieces(*teams):
        if {first, second} == set(channel.workers):
            value = Value(kind, boundary, producer.mb, producer.replica, 0, producer.part, piece)
            return value, second if forward else first
    return None, NONE


class StuckError(MeshwrightError):
    """The lists of a schedule wait for each other; `entry` on `worker` waits. `schedule` may already be partly lowered."""

    def __init__(self, what: str, worker: int, entry: Entry, schedule: Schedule) -> None:
        super().__init__(what, fix="meshwright check shows the place on a grid")
        self.worker, self.entry, self.schedule = worker, entry, schedule


def stuck_error(schedule: Schedule, flow: Flow, order: Sweep) -> StuckError:
    """Builds the error for a schedule that cannot finish; says what it waits for."""
    stuck = {worker: index for worker, index in order.stuck.items() if worker < schedule.workers}
    worker, index = min(stuck.items(), key=lambda item: (item[1], item[0]))
    entry = schedule.lists[worker][index]
    reason = f"waits for {flow.values[order.missing[worker]]}" if worker in order.missing else "waits for its partners"
    return StuckError(f"{schedule.name} cannot run: worker {worker} stops at {entry}, which {reason}", worker, entry, schedule)
