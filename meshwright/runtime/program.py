"""A worker's list made ready to run: effects asked for once, values numbered, messages with their channels.

The executor walks the steps and never asks what depends on what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.ir.action import COMPUTE, NONE, Action, Entry, Kind, Op, Transfer, Value, actions
from meshwright.ir.analysis.effects import rule
from meshwright.ir.schedule import Schedule
from meshwright.runtime.transport.base import Channel


@dataclass(slots=True)
class Step:
    """One action or one end of a message. `reads` and `writes` are slots, keyed by kind; `round` is that of its gradients.

    An update is `in_place` where nobody later wants the version that it replaces; `drops` are versions whose last reader
    this is; `releases`: this is the last use of its unit's gradients of this round; `waits` and `signals` are turns. `words`
    is what a worker that dies here has said: `name` and `stage`.
    """

    entry: Entry
    action: Action
    reads: dict[Kind, tuple[int, ...]]
    writes: dict[Kind, tuple[int, ...]]
    round: int
    value: Value | None = None
    slot: int = NONE
    channel: Channel | None = None
    sends: bool = False
    in_place: bool = True
    drops: tuple[Value, ...] = ()
    releases: bool = False
    waits: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    words: bytes = b""

    def __post_init__(self) -> None:
        self.words = f"{self.name} {self.stage}".encode()

    @property
    def name(self) -> str:
        """As text, `2B5`."""
        return str(self.action if self.channel is None else self.entry)

    @property
    def stage(self) -> int:
        """The stage that it belongs to."""
        return self.action.stage if self.value is None else self.value.stage

    @property
    def receives(self) -> bool:
        """Is this the receiving end of a message?"""
        return self.channel is not None and not self.sends


@dataclass(frozen=True)
class Program:
    """The steps of one worker, and what its slots stand for."""

    schedule: Schedule
    worker: int
    steps: tuple[Step, ...]
    values: tuple[Value, ...]

    def early(self, depth: Mapping[Channel, int]) -> tuple[Step, ...]:
        """The steps with each receive moved up to where, `depth` messages before it on its channel, one is read.

        What does not block may be posted there: a message that finds its receive posted needs one round trip less.
        """
        last_read = {slot: index for index, step in enumerate(self.steps) for slots in step.reads.values() for slot in slots}
        behind: dict[int, list[Step]] = defaultdict(list)
        seen: dict[Channel, list[Step]] = defaultdict(list)
        for index, step in enumerate(self.steps):
            if step.channel is None or step.sends:
                continue
            before, ahead = seen[step.channel], depth[step.channel]
            place = last_read.get(before[-ahead].slot, index) if len(before) >= ahead else -1
            behind[min(place, index)].append(step)
            before.append(step)
        moved = {id(step) for steps in behind.values() for step in steps}
        found = list(behind[-1])
        for index, step in enumerate(self.steps):
            if id(step) not in moved:
                found.append(step)
            found += behind[index]
        return tuple(found)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this worker holds, in order."""
        return tuple(sorted({stage for _, stage in self.schedule.placement.held[self.worker]}))

    @property
    def units(self) -> tuple[int, ...]:
        """The units whose parameters this worker holds."""
        return tuple(unit for unit, workers in enumerate(self.schedule.holders) if self.worker in workers)


_MESSAGE = Action(Op.F, NONE)
"""What stands in a step that is a message."""


def program(schedule: Schedule, worker: int, rank_of: Callable[[int], int]) -> Program:
    """Compile one worker's list; `rank_of` says which rank a worker of this copy is."""
    effects = rule(schedule)
    slots: dict[Value, int] = {}
    steps: list[Step] = []
    for entry in schedule.lists[worker]:
        if isinstance(entry, Transfer):
            steps.append(_message(entry, worker, slots, rank_of))
            continue
        for action in actions(entry):
            found = effects(worker, action)
            round_ = action.mb // schedule.microbatches if action.op in COMPUTE else action.version
            step = Step(entry, action, _by_kind(found.reads, slots), _by_kind(found.writes, slots), round_)
            step.waits, step.signals = step.reads.get(Kind.TURN, ()), step.writes.get(Kind.TURN, ())
            steps.append(step)
    _mark_versions(steps, list(slots))
    _mark_releases(steps)
    return Program(schedule, worker, tuple(steps), tuple(slots))


def channels(schedule: Schedule, copies: int) -> tuple[Channel, ...]:
    """Every channel of a run in one order, the same on all ranks; copy j of worker w is rank w + workers * j."""
    found = {
        (worker, entry.peer, entry.value.kind)
        for worker, entries in enumerate(schedule.lists)
        for entry in entries
        if isinstance(entry, Transfer) and entry.sends
    }
    count = schedule.workers
    return tuple(
        Channel(source + count * copy, target + count * copy, kind)
        for copy in range(copies)
        for source, target, kind in sorted(found)
    )


def _message(entry: Transfer, worker: int, slots: dict[Value, int], rank_of: Callable[[int], int]) -> Step:
    slot = slots.setdefault(entry.value, len(slots))
    ends = (worker, entry.peer) if entry.sends else (entry.peer, worker)
    channel = Channel(rank_of(ends[0]), rank_of(ends[1]), entry.value.kind)
    return Step(entry, _MESSAGE, {}, {}, 0, entry.value, slot, channel, entry.sends)


def _by_kind(values: tuple[Value, ...], slots: dict[Value, int]) -> dict[Kind, tuple[int, ...]]:
    found: dict[Kind, tuple[int, ...]] = {}
    for value in values:
        found[value.kind] = (*found.get(value.kind, ()), slots.setdefault(value, len(slots)))
    return found


def _mark_versions(steps: list[Step], values: list[Value]) -> None:
    """Parameter lifetime is liveness over the worker's list."""
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for slot in step.reads.get(Kind.PARAM, ()):
            last[slot] = index
    replaced = {(step.action.stage, step.action.version): index for index, step in enumerate(steps) if step.action.op is Op.U}
    for slot, index in last.items():
        value = values[slot]
        if (update := replaced.get((value.stage, value.version))) is not None:
            steps[update].in_place = index <= update
            steps[index].drops += (value,)


def _mark_releases(steps: list[Step]) -> None:
    """A round's gradients end with the update, or with the sum that is handed on after it."""
    last: dict[tuple[int, int], Step] = {}
    for step in steps:
        if step.action.op is Op.U:
            last[step.action.stage, step.action.version] = step
        elif step.value is not None and step.value.kind is Kind.SUM and step.sends:
            last[step.value.stage, step.value.version] = step
    for step in last.values():
        step.releases = True
