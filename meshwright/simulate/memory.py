"""What every worker holds over time, from the effects of what it does and when."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.action import NONE, Action, Entry, Kind, Op, Value, actions
from meshwright.ir.effects import ACTIVATIONS, CONSUMED
from meshwright.ir.order import Flow
from meshwright.ir.price import Price
from meshwright.ir.timeline import Level

Times = Sequence[tuple[float, float]]
"""(start, end) of every entry of a worker's list."""


def memory(flow: Flow, price: Price, worker: int, times: Times) -> tuple[Level, ...]:
    """Levels of bytes and activations of one worker: made at the start of an action, ended at the end of the last use."""
    schedule = flow.schedule
    entries, reads, writes = flow.lists[worker], flow.reads[worker], flow.writes[worker]
    weight = schedule.workers / schedule.stages
    last_use = {value: index for index, values in enumerate(reads) for value in values}
    changes: list[tuple[float, bool, float, float]] = []
    gradients: dict[tuple[int, int], list[float]] = {}

    def change(time: float, value_id: int, sign: int) -> None:
        value = flow.values[value_id]
        size = price.value_bytes(worker, value)
        count = weight * _fraction(price, worker, value) if value.kind in ACTIVATIONS else 0.0
        if size or count:
            changes.append((time, sign > 0, sign * size, sign * count))

    for value_id in flow.initial[worker]:
        change(0.0, value_id, +1)
        if value_id in last_use and _ends(flow, value_id):
            change(times[last_use[value_id]][1], value_id, -1)
    for index, (start, end) in enumerate(times):
        for value_id in writes[index]:
            value = flow.values[value_id]
            if value.kind is Kind.WGRAD:
                gradients.setdefault((value.stage, value.mb // schedule.microbatches), []).append(start)
                continue
            change(start if value.kind is not Kind.PARAM else end, value_id, +1)
            if value_id in last_use and _ends(flow, value_id):
                use = last_use[value_id]
                swapped = value.kind in ACTIVATIONS and _swaps(entries[use], value)
                change(times[use][0 if swapped else 1], value_id, -1)
        for action in actions(entries[index]):
            if extra := _working(price, worker, action):
                changes += [(start, True, extra, 0.0), (end, False, -extra, 0.0)]
    updates = {(e.stage, e.version): times[i][1] for i, e in enumerate(entries) if isinstance(e, Action) and e.op is Op.U}
    for (unit, round_), starts in gradients.items():
        size = price.value_bytes(worker, Value(Kind.WGRAD, unit))
        if size:
            changes += [(min(starts), True, size, 0.0), (updates.get((unit, round_), times[-1][1]), False, -size, 0.0)]
    return _levels(changes)


def parameter_copies(flow: Flow, worker: int) -> float:
    """The most parameter versions alive at once, in units of one worker's share of the model.

    A version lives until its last reader; an update is in place where nobody later wants the old one.
    """
    last = {value: index for index, values in enumerate(flow.reads[worker]) for value in values}
    made = dict.fromkeys(flow.initial[worker], -1)
    made |= {value: index for index, values in enumerate(flow.writes[worker]) for value in values}
    deltas: dict[int, int] = {}
    for value, index in made.items():
        found = flow.values[value]
        if found.kind is not Kind.PARAM or found.stage >= flow.schedule.stages:
            continue
        newest = Value(Kind.PARAM, found.stage, NONE, 0, found.version + 1, NONE, worker)
        replaced = flow.ids.get(newest) in made
        end = last.get(value, index) if replaced else len(flow.reads[worker]) + 1
        deltas[2 * index + 1] = deltas.get(2 * index + 1, 0) + 1
        deltas[2 * end] = deltas.get(2 * end, 0) - 1
    now = peak = 0
    for key in sorted(deltas):
        now += deltas[key]
        peak = max(peak, now)
    return peak * flow.schedule.workers / flow.schedule.stages


def _swaps(entry: Entry, value: Value) -> bool:
    """Does this use turn one form of the activations into another (R: kept into saved, I: saved into rest)?"""
    return any(a.op in (Op.R, Op.I) and (a.stage, a.mb) == (value.stage, value.mb) for a in actions(entry))


def _ends(flow: Flow, value_id: int) -> bool:
    """Does a value end with its last local use? Parameters only if they are replaced."""
    value = flow.values[value_id]
    if value.kind is Kind.PARAM:
        return value._replace(version=value.version + 1) in flow.ids
    return value.kind in CONSUMED or value.kind is Kind.SUM or value.kind is Kind.NORM


def _working(price: Price, worker: int, action: Action) -> float:
    """Activations that exist only while a backward with recompute inside runs."""
    recompute = price.schedule.recompute
    if action.op not in (Op.B, Op.I) or not recompute:
        return 0.0
    how = recompute[action.stage]
    if how.early or not how.share:
        return 0.0
    return how.share * price.value_bytes(worker, Value(Kind.SAVED, action.stage, action.mb, action.replica, 0, action.part))


def _fraction(price: Price, worker: int, value: Value) -> float:
    whole = 1.0 if value.part == NONE else 1.0 / price.schedule.parts
    return whole if price.narrow else whole * price.row_share(worker, value.replica, value.stage, value.mb)


def _levels(changes: list[tuple[float, bool, float, float]]) -> tuple[Level, ...]:
    """Add changes up in time order; at one moment what ends goes first."""
    changes.sort(key=lambda change: (change[0], change[1]))
    size = count = 0.0
    levels: list[Level] = []
    for time, _, bytes_, activations in changes:
        size += bytes_
        count += activations
        level = Level(time, size, round(count, 9))
        if levels and levels[-1].time_s == time and bytes_ + activations >= 0 and levels[-1].bytes <= size:
            levels[-1] = level
        else:
            levels.append(level)
    return tuple(levels)
