"""How long each value lives on a worker: from the start of what makes it to the end of its last use there.

Times play no part: a moment is a place in the worker's list, 2 i for the start of entry i and 2 i + 1 for its end. The
simulator lays them over a clock, the byte budget counts them in order.

    activations   F to B or W; R and I turn one form into another at their start, which is no second copy
    gradients     one buffer per unit and round, from the first backward to the update; a sum lands in it, and stays
                  until a ring has handed it on
    parameters    a version until its last reader; an update is in place where nobody later wants the old one
    messages      with the sender until sent, with the receiver from the start of the message
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.ir.action import NONE, Action, Entry, Kind, Op, Transfer, Value, actions
from meshwright.ir.effects import ACTIVATIONS, CONSUMED
from meshwright.ir.order import Flow
from meshwright.ir.price import Price
from meshwright.ir.schedule import Schedule

WEIGHTLESS = frozenset({Kind.NORM, Kind.OPT, Kind.TURN})
"""Kinds that take no memory that is counted here."""

BEFORE = -1
"""The moment before a list starts."""


class Life(NamedTuple):
    """A value on a worker between two moments (None: to the end), its bytes, and its share of a worker's activations."""

    value: Value
    made: int
    ended: int | None
    bytes: float
    activations: float


def lives(flow: Flow, price: Price, worker: int) -> Iterator[Life]:
    """Everything that a worker holds at some time."""
    entries, writes = flow.lists[worker], flow.writes[worker]
    last = {value: index for index, values in enumerate(flow.reads[worker]) for value in values}
    gradients = dict(_gradients(flow, worker))
    for number in flow.initial[worker]:
        if flow.values[number].kind in WEIGHTLESS:
            continue
        yield _life(flow, price, worker, number, BEFORE, last)
    for index, entry in enumerate(entries):
        for number in writes[index]:
            value = flow.values[number]
            if value.kind is Kind.WGRAD or value.kind in WEIGHTLESS or _in_buffer(value, entry, gradients):
                continue
            yield _life(flow, price, worker, number, 2 * index + (value.kind is Kind.PARAM), last)
        for action in actions(entry):
            if size := _working(price, worker, action):
                yield Life(_saved(action), 2 * index, 2 * index + 1, size, 0.0)
    for (unit, _), (first, end) in gradients.items():
        buffer = Value(Kind.WGRAD, unit)
        yield Life(buffer, 2 * first, end, price.value_bytes(worker, buffer), 0.0)


def parameter_copies(found: Sequence[Life], schedule: Schedule) -> float:
    """The most parameter versions alive at once, in units of one worker's share of the model."""
    params = [life for life in found if life.value.kind is Kind.PARAM and life.value.stage < schedule.stages]
    return max(_counts(params), default=0) * schedule.workers / schedule.stages


def _counts(found: list[Life]) -> Iterator[int]:
    """How many lives there are after each change; at one moment what ends goes first."""
    changes = [(life.made, 1, 1) for life in found] + [(life.ended, 0, -1) for life in found if life.ended is not None]
    now = 0
    for _, _, step in sorted(changes):
        now += step
        yield now


def _life(flow: Flow, price: Price, worker: int, number: int, made: int, last: dict[int, int]) -> Life:
    value = flow.values[number]
    ended = None
    if number in last and _ends(flow, value):
        use = last[number]
        swapped = value.kind in ACTIVATIONS and _swaps(flow.lists[worker][use], value)
        ended = 2 * use + (not swapped)
    count = 0.0
    if value.kind in ACTIVATIONS:
        count = _fraction(price, worker, value) * flow.schedule.workers / flow.schedule.stages
    return Life(value, made, ended, price.value_bytes(worker, value), count)


def _gradients(flow: Flow, worker: int) -> Iterator[tuple[tuple[int, int], tuple[int, int | None]]]:
    """For each (unit, round) with gradients here: the entry that makes the first, and the moment of the last use.

    That is the update, or the send behind it that hands a ring's sum on.
    """
    first: dict[tuple[int, int], int] = {}
    update: dict[tuple[int, int], int] = {}
    for index, entry in enumerate(flow.lists[worker]):
        for number in flow.writes[worker][index]:
            value = flow.values[number]
            if value.kind is Kind.WGRAD:
                first.setdefault((value.stage, value.mb // flow.schedule.microbatches), index)
        if type(entry) is Action and entry.op is Op.U:
            update[entry.stage, entry.version] = 2 * index + 1
        elif type(entry) is Transfer and entry.sends and entry.value.kind is Kind.SUM:
            update[entry.value.stage, entry.value.version] = 2 * index + 1
    yield from ((key, (index, update.get(key))) for key, index in first.items())


def _in_buffer(value: Value, entry: Entry, gradients: dict[tuple[int, int], tuple[int, int | None]]) -> bool:
    """Does this value live in the gradient buffer: a sum, or the partial sum that this worker adds up itself?"""
    if (value.stage, value.version) not in gradients:
        return False
    return value.kind is Kind.SUM or (value.kind is Kind.PARTIAL and not isinstance(entry, Transfer))


def _swaps(entry: Entry, value: Value) -> bool:
    """Does this use turn one form of the activations into another (R: kept into saved, I: saved or kept into rest)?"""
    return any((a.op is Op.R or a.op is Op.I) and (a.stage, a.mb) == (value.stage, value.mb) for a in actions(entry))


def _ends(flow: Flow, value: Value) -> bool:
    """Does a value end with its last local use? Parameters only if they are replaced."""
    if value.kind is Kind.PARAM:
        return value._replace(version=value.version + 1) in flow.ids
    return value.kind in CONSUMED or value.kind is Kind.SUM or value.kind is Kind.NORM


def _working(price: Price, worker: int, action: Action) -> float:
    """Activations that exist only while a whole backward with recompute inside runs."""
    recompute = price.schedule.recompute
    if action.op is not Op.B or not recompute or recompute[action.stage].early:
        return 0.0
    return recompute[action.stage].share * price.value_bytes(worker, _saved(action))


def _saved(action: Action) -> Value:
    return Value(Kind.SAVED, action.stage, action.mb, action.replica, 0, action.part)


def _fraction(price: Price, worker: int, value: Value) -> float:
    whole = 1.0 if value.part == NONE else 1.0 / price.schedule.parts
    return whole if price.narrow else whole * price.row_share(worker, value.replica, value.stage, value.mb)
