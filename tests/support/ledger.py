"""What a worker holds, counted again from its lowered list and the times of its spans alone.

A moment is the start or the end of an entry. Moments are in order of time; at one time the entries that took time end
first, then all else goes by the list. Whatever is held from one moment on is no longer held at another, so that what is
handed over at a moment is not counted twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest

from meshwright import Action, Op, Recompute, Schedule, StageCost, Timeline, Transfer, lower, simulate
from meshwright.ir.action import COMPUTE, Kind, Value, actions
from tests.support.random_schedules import Case, row_count, rows_of


class Moment(NamedTuple):
    """A time, and the place among all that happens at that time."""

    time: float
    by_list: bool
    place: int


BEGIN = Moment(0.0, False, -1)
NEVER = Moment(float("inf"), False, 0)
When = tuple[Moment, Moment]
"""The start and the end of an entry."""


class Held(NamedTuple):
    """Something that a worker holds from `start` on and no longer at `end`."""

    start: Moment
    end: Moment
    bytes: float
    activations: float = 0.0


class Book:
    """One worker's lowered list with its times: who made what when, and who used it last."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], timeline: Timeline, worker: int) -> None:
        self.schedule, self.costs, self.worker = schedule, costs, worker
        self.entries = schedule.lists[worker]
        place = {entry: index for index, entry in enumerate(self.entries)}
        assert len(place) == len(self.entries)
        self.when = {s.entry: _when(s.start_s, s.end_s, place[s.entry]) for s in timeline.spans if s.worker == worker}
        self.done = {action: self.when[entry] for entry in self.entries for action in actions(entry)}
        self.plain = {action._replace(version=0): when for action, when in self.done.items() if action.op in COMPUTE}
        self.moved = {entry: self.when[entry] for entry in self.entries if isinstance(entry, Transfer)}

    def start(self, *, ops: tuple[Op, ...], like: Action, part: int | None = None) -> Moment:
        """When the first of these ops of an action's microbatch starts."""
        return min(when[0] for when in self._of(ops, like, part))

    def end(self, *, ops: tuple[Op, ...], like: Action, part: int | None = None) -> Moment:
        """When the last of these ops ends."""
        return max(when[1] for when in self._of(ops, like, part))

    def _of(self, ops: tuple[Op, ...], like: Action, part: int | None) -> list[When]:
        part = like.part if part is None else part
        found = [self.plain.get(like._replace(op=op, part=part, version=0)) for op in ops]
        return [when for when in found if when is not None]

    def share(self, action: Action, part: int) -> float:
        """Which fraction of a microbatch's rows and halves this worker has of it."""
        placement = self.schedule.placement
        rows = rows_of(placement, placement.team(action.replica, action.stage, action.mb), self.worker)
        return len(rows) / row_count(placement) / (1 if part < 0 else self.schedule.parts)


def _when(start: float, end: float, place: int) -> When:
    return Moment(start, True, 2 * place), Moment(end, end == start, 2 * place + 1)


def books(case: Case) -> tuple[Timeline, list[Book]]:
    """A case simulated, and a book for each worker."""
    timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
    lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster)
    return timeline, [Book(lowered, case.costs, timeline, worker) for worker in range(lowered.workers)]


def activations(book: Book) -> list[Held]:
    """What forwards leave for backwards: from the start of F to the end of B or W."""
    schedule, found = book.schedule, []
    for action in book.done:
        if action.op is Op.F:
            parts = (action.part,) if action.part >= 0 or schedule.parts == 1 else tuple(range(schedule.parts))
            for part in parts:
                found += _activations(book, action, part)
    return found


def _activations(book: Book, action: Action, part: int) -> list[Held]:
    """All of it; where it is recomputed, the input and what is not dropped until R, I or the end of B.

    R and I have all of it back from their start on, and the input is part of it then. A whole backward with recompute
    inside has it on top of the input, while it runs.
    """
    schedule, stage, begin = book.schedule, action.stage, book.done[action][0]
    end = book.end(ops=(Op.B, Op.W), like=action, part=part)
    share = book.share(action, part)
    count = share * schedule.workers / schedule.stages
    full = book.costs[stage].activation_bytes * share
    how = schedule.recompute[stage] if schedule.recompute else Recompute(0.0)
    if not how.share:
        return [Held(begin, end, full, count)]
    kept = (1.0 - how.share) * full + (book.costs[stage - 1].output_bytes * share if stage else 0.0)
    again = book.start(ops=(Op.R,) if how.early else (Op.B, Op.I), like=action, part=part)
    if how.early or action._replace(op=Op.I, part=part, version=0) in book.plain:
        return [Held(begin, again, kept, count), Held(again, end, full, count)]
    return [Held(begin, end, kept, count), Held(again, end, how.share * full)]


def messages(book: Book) -> list[Held]:
    """Outputs and gradients of stages: with their maker until they are used there or off; with a receiver from their start."""
    found = []
    for entry, (start, _) in book.moved.items():
        value = entry.value
        if not entry.sends and value.kind in (Kind.ACT, Kind.GRAD):
            ops = (Op.F,) if value.kind is Kind.ACT else (Op.B, Op.I)
            stage = value.stage + (value.kind is Kind.ACT)
            reader = Action(Op.F, stage, value.mb, value.replica, part=value.part)
            near = value.stage + (value.kind is Kind.GRAD)
            rows = _common_rows(book, reader, near, book.worker, entry.peer)
            found.append(Held(start, book.end(ops=ops, like=reader), _rows_bytes(book, reader, value.kind, near, rows)))
    for action in book.done:
        if action.op in (Op.F, Op.B, Op.I):
            found += _outputs(book, action)
    return found


def _outputs(book: Book, action: Action) -> list[Held]:
    """What an action makes for its neighbours, one piece for each worker that has rows of it."""
    kind, near, ops = (Kind.ACT, action.stage + 1, (Op.F,)) if action.op is Op.F else (Kind.GRAD, action.stage - 1, (Op.B, Op.I))
    if not 0 <= near < book.schedule.stages:
        return []
    found = []
    for other in book.schedule.placement.team(action.replica, near, action.mb):
        rows = _common_rows(book, action, near, book.worker, other)
        if rows and other == book.worker:
            end = book.end(ops=ops, like=action._replace(stage=near))
        elif rows:
            value = Value(kind, min(action.stage, near), action.mb, action.replica, 0, action.part)
            end = next(when[1] for e, when in book.moved.items() if e.sends and e.peer == other and _whole(e.value) == value)
        else:
            continue
        found.append(Held(book.done[action][0], end, _rows_bytes(book, action, kind, near, rows)))
    return found


def _whole(value: Value) -> Value:
    return value._replace(piece=-1)


def _common_rows(book: Book, action: Action, near: int, mine: int, theirs: int) -> int:
    """How many rows two workers of neighbouring stages both have."""
    placement = book.schedule.placement
    here, there = (placement.team(action.replica, stage, action.mb) for stage in (action.stage, near))
    return len(rows_of(placement, here, mine) & rows_of(placement, there, theirs))


def _rows_bytes(book: Book, action: Action, kind: Kind, near: int, rows: int) -> float:
    """The size of some rows at the boundary between an action's stage and the one near it."""
    cost = book.costs[min(action.stage, near)]
    whole = cost.output_bytes if kind is Kind.ACT else cost.gradient_bytes
    return whole * rows / row_count(book.schedule.placement) / (1 if action.part < 0 else book.schedule.parts)


def parameters(book: Book) -> list[Held]:
    """Every version of every stage from its update to its last reader, the newest for ever; the gradients of every round."""
    found = []
    for stage in {stage for _, stage in book.schedule.placement.held[book.worker]}:
        size = book.costs[stage].parameter_bytes
        updates = {a.version: when[1] for a, when in book.done.items() if a.op is Op.U and a.stage == stage}
        readers: dict[int, Moment] = defaultdict(lambda: BEGIN)
        for action, (_, end) in book.done.items():
            if action.stage == stage and action.op not in (Op.S, Op.N):
                readers[action.version] = max(readers[action.version], end)
        for version in range(len(updates) + 1):
            begin = updates[version - 1] if version else BEGIN
            found.append(Held(begin, readers[version] if version in updates else NEVER, size))
        for round_, updated in updates.items():
            found += [Held(start, end, size) for start, end in _gradients(book, stage, round_, updated)]
    return found


def _gradients(book: Book, stage: int, round_: int, updated: Moment) -> Iterable[When]:
    """One buffer from the first gradient, or the sum, to the update; longer where the sum still has to go on in a ring.

    A running sum that comes round a ring is there beside the buffer until it has been added.
    """
    backwards = [
        when[0]
        for a, when in book.done.items()
        if a.op in (Op.B, Op.W) and (a.stage, a.mb // book.schedule.microbatches) == (stage, round_)
    ]
    sync = book.done.get(Action(Op.S, stage, version=round_))
    sums = {
        e: w for e, w in book.moved.items() if e.value.kind is Kind.SUM and (e.value.stage, e.value.version) == (stage, round_)
    }
    makes = backwards or ([sync[0]] if sync else [when[0] for entry, when in sums.items() if not entry.sends])
    yield min(makes), max([updated, *(when[1] for entry, when in sums.items() if entry.sends)])
    for entry, when in book.moved.items():
        if entry.value.kind is Kind.PARTIAL and not entry.sends and (entry.value.stage, entry.value.version) == (stage, round_):
            assert sync is not None
            yield when[0], sync[1]


def agree(timeline: Timeline, worker: int, found: Sequence[Held], *, counted: bool = True) -> None:
    """The same level at every time, and the same peaks; `counted=False` looks at bytes alone."""
    moments = sorted({moment for held in found for moment in (held.start, held.end) if moment < NEVER})
    held_at = [[held for held in found if held.start <= moment < held.end] for moment in moments]
    wanted = {m.time: (_bytes(now), _count(now)) for m, now in zip(moments, held_at, strict=True)}
    levels = {level.time_s: level for level in timeline.memory[worker]}
    size = count = now_size = now_count = 0.0
    for time in sorted(wanted.keys() | levels):
        size, count = wanted.get(time, (size, count))
        if time in levels:
            now_size, now_count = levels[time].bytes, levels[time].activations
        assert now_size == pytest.approx(size, abs=1e-6), f"bytes of worker {worker} at {time}"
        assert not counted or now_count == pytest.approx(count, abs=1e-6), f"activations of worker {worker} at {time}"
    assert timeline.peak_bytes(worker) == pytest.approx(max(map(_bytes, held_at), default=0.0), abs=1e-6)
    assert not counted or timeline.peak(worker) == pytest.approx(max(map(_count, held_at), default=0.0), abs=1e-6)


def _bytes(found: Iterable[Held]) -> float:
    return sum(held.bytes for held in found)


def _count(found: Iterable[Held]) -> float:
    return sum(held.activations for held in found)
