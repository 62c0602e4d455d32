"""How long each value lives on a worker: from the start of the entry that makes it to the end of its last use there.

Lifetimes do not depend on times. A moment is a position in the worker's list: 2 i for the start of entry i and 2 i + 1 for
its end. The simulator maps moments to times; the byte budget walks through them in order.

    activations   from F to B or W; R and I convert one form into another at their start, without a second copy
    gradients     one buffer per unit and round, from the first backward to the update; it also holds the sum, and
                  lives until a ring has passed the sum on
                  if holders divide the sum among them: also a slice of it, for as long
                  if they divide gradients too: one buffer from a backward to its sum, and a slice from the first backward to
                  the update
    parameters    a version lives until its last reader, and so does what was gathered for some actions; an update is in place
                  if the old version is not read later
                  where units have owners: on the owner as above; on another worker from the start of the message to the last use
    messages      on the sender until sent, on the receiver from the start of the message
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.ir.action import NONE, Action, Entry, Kind, Op, Transfer, Value, actions
from meshwright.ir.analysis.effects import ACTIVATIONS, CONSUMED
from meshwright.ir.analysis.order import Flow
from meshwright.ir.analysis.price import Price
from meshwright.ir.schedule import Schedule, Sharding

UNCOUNTED = frozenset({Kind.NORM, Kind.TURN, Kind.WGRAD})
"""Kinds that use no memory counted here, or share the memory of a buffer."""

SUMS = frozenset({Kind.SUM, Kind.PARTIAL})
MESSAGES = frozenset({Kind.ACT, Kind.GRAD})

BEFORE = -1
"""The moment before a list starts."""


class Life(NamedTuple):
    """A value on a worker between two moments (None: until the end), its bytes, and its share of a worker's activations."""

    value: Value
    made: int
    ended: int | None
    bytes: float
    activations: float


def lives(flow: Flow, price: Price, worker: int) -> Iterator[Life]:
    """Yields everything that a worker holds at some time."""
    entries, values = flow.lists[worker], flow.values
    last = {
        _stored(flow, worker, number) if values[number].kind is Kind.PARAM else number: index
        for index, reads in enumerate(flow.reads[worker])
        for number in reads
    }
    gradients = dict(_gradients(flow, worker))
    for number in flow.initial[worker]:
        if values[number].kind not in UNCOUNTED and _stored(flow, worker, number) == number:
            yield _life(flow, price, worker, number, BEFORE, last)
    for index, (entry, writes) in enumerate(zip(entries, flow.writes[worker], strict=True)):
        for number in writes:
            kind = values[number].kind
            if kind in UNCOUNTED or (kind in SUMS and _in_buffer(values[number], entry, gradients)):
                continue
            if kind is Kind.PARAM and _stored(flow, worker, number) != number:
                continue
            if kind in MESSAGES and not price.value_bytes(worker, values[number]):
                continue
            in_place = kind in (Kind.PARAM, Kind.SHARD, Kind.OPT) and values[number].mb == NONE and type(entry) is Action
            yield _life(flow, price, worker, number, 2 * index + in_place, last)
    if price.recompute:
        yield from _working(flow, price, worker)
    for (unit, _), (first, end) in gradients.items():
        buffer = Value(Kind.WGRAD, unit)
        whole = price.value_bytes(worker, buffer)
        if not flow.schedule.sharding.sums_singly:
            yield Life(buffer, 2 * first, end, whole, 0.0)
        if flow.schedule.sharding is not Sharding.NONE:
            yield Life(buffer, 2 * first, end, whole / price.shares(unit), 0.0)
    if flow.schedule.sharding.sums_singly:
        yield from _whole_gradients(flow, price, worker)


def parameter_copies(found: Sequence[Life], schedule: Schedule) -> float:
    """Returns the most parameter versions alive at once (1 = one worker's share of the model)."""
    params = [life for life in found if life.value.kind is Kind.PARAM and life.value.stage < schedule.stages]
    return max(_counts(params), default=0) * schedule.workers / schedule.stages


def _counts(found: list[Life]) -> Iterator[int]:
    """Yields the number of lives after each change. At the same moment, ends come first."""
    changes = [(life.made, 1, 1) for life in found] + [(life.ended, 0, -1) for life in found if life.ended is not None]
    now = 0
    for _, _, step in sorted(changes):
        now += step
        yield now


def _life(flow: Flow, price: Price, worker: int, number: int, made: int, last: dict[int, int]) -> Life:
    value = flow.values[number]
    active = value.kind in ACTIVATIONS
    ended = None
    if (use := last.get(number)) is not None and _ends(flow, worker, value):
        ended = 2 * use + (not (active and _swaps(flow.lists[worker][use], value)))
    count = _fraction(price, worker, value) * flow.schedule.workers / flow.schedule.stages if active else 0.0
    return Life(value, made, ended, price.value_bytes(worker, value), count)


def _gradients(flow: Flow, worker: int) -> Iterator[tuple[tuple[int, int], tuple[int, int | None]]]:
    """For each (unit, round) with gradients here: the entry that makes the first one, and the moment of the last use.

    The last use is the update, or a later send that passes on the sum of a ring, also without an update here.
    """
    first: dict[tuple[int, int], int] = {}
    update: dict[tuple[int, int], int] = {}
    values, microbatches = flow.values, flow.schedule.microbatches
    for index, (entry, writes) in enumerate(zip(flow.lists[worker], flow.writes[worker], strict=True)):
        for number in writes:
            value = values[number]
            if value.kind is Kind.WGRAD:
                first.setdefault((value.stage, value.mb // microbatches), index)
        if type(entry) is Action and entry.op is Op.U:
            update[entry.stage, entry.version] = 2 * index + 1
        elif type(entry) is Transfer and entry.sends and entry.value.kind in SUMS:
            update[entry.value.stage, entry.value.version] = 2 * index + 1
    yield from ((key, (index, update.get(key))) for key, index in first.items())


def _whole_gradients(flow: Flow, price: Price, worker: int) -> Iterator[Life]:
    """Yields the gradients of single backwards, which live until their sum."""
    made: dict[int, int] = {}
    for index, (reads, writes) in enumerate(zip(flow.reads[worker], flow.writes[worker], strict=True)):
        made |= {number: index for number in writes if flow.values[number].kind is Kind.WGRAD}
        for number in reads:
            if flow.values[number].kind is Kind.WGRAD:
                value = flow.values[number]
                yield Life(value, 2 * made[number], 2 * index + 1, price.value_bytes(worker, value), 0.0)


def _in_buffer(value: Value, entry: Entry, gradients: dict[tuple[int, int], tuple[int, int | None]]) -> bool:
    """True if this value lives in the gradient buffer: a sum, or the partial sum that this worker adds up itself."""
    if (value.stage, value.version) not in gradients:
        return False
    return value.kind is Kind.SUM or not isinstance(entry, Transfer)


def _swaps(entry: Entry, value: Value) -> bool:
    """True if this use converts activations (R: kept into saved, I: saved or kept into rest)."""
    if type(entry) is Action and (entry.op is Op.B or entry.op is Op.W):
        return False
    return any((a.op is Op.R or a.op is Op.I) and (a.stage, a.mb) == (value.stage, value.mb) for a in actions(entry))


def _stored(flow: Flow, worker: int, number: int) -> int:
    """Returns the value in whose memory a value is. On its owner a unit has one copy for forwards and backwards."""
    value = flow.values[number]
    owned = value.kind is Kind.PARAM and value.part != NONE and worker in flow.schedule.holders[value.stage]
    return flow.ids.get(value._replace(part=0), number) if owned else number


def _ends(flow: Flow, worker: int, value: Value) -> bool:
    """True if a value ends with its last local use. Parameters end only if an update replaces them here."""
    if value.kind in CONSUMED:
        return True
    if value.kind is Kind.PARAM and (value.mb != NONE or worker not in flow.schedule.holders[value.stage]):
        return True
    if value.kind in (Kind.PARAM, Kind.SHARD, Kind.OPT):
        return value._replace(version=value.version + 1) in flow.ids and not _is_kept(flow, worker, value)
    return value.kind is Kind.SUM or value.kind is Kind.NORM


def _is_kept(flow: Flow, worker: int, value: Value) -> bool:
    """True if the next rounds need a version at the end of the lists: the last but one, where it was held at their start."""
    first, steps = flow.schedule.first, flow.schedule.steps
    if not first or value.version != first + steps - 1:
        return False
    return flow.ids.get(value._replace(version=first - 1)) in flow.initial[worker]


def _working(flow: Flow, price: Price, worker: int) -> Iterator[Life]:
    """Yields activations that exist only while a whole backward with inline recompute runs."""
    for index, entry in enumerate(flow.lists[worker]):
        for action in actions(entry):
            if action.op is Op.B and not price.recompute[action.stage].early:
                saved = Value(Kind.SAVED, action.stage, action.mb, action.replica, 0, action.part)
                size = price.recompute[action.stage].share * price.value_bytes(worker, saved)
                yield Life(saved, 2 * index, 2 * index + 1, size, 0.0)


def _fraction(price: Price, worker: int, value: Value) -> float:
    whole = 1.0 if value.part == NONE else 1.0 / price.schedule.parts
    return whole if price.narrow else whole * price.row_share(worker, value.replica, value.stage, value.mb)
