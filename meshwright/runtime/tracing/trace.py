"""Record start and end of every action, message and sync on one rank. Off by default.

    action    from the arrival of its inputs to its end
    send      from its start until the transport has taken it
    receive   from its post to the end of the wait for it, at first use
    sync      from its launch to the end of the wait for it

Times are host times. On a GPU they show when work was launched, not when it ran.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from meshwright.ir.action import Cell, Entry, Op, Transfer, parse
from meshwright.ir.analysis.effects import collective
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Lane, Span, Timeline
from meshwright.runtime.json_exchange import gather_json
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.program import Instruction
from meshwright.runtime.tracing.clock import Clock, now

Record = tuple[Instruction, float, float]
"""Instruction, start, end."""

Sync = tuple[int, int]
"""Unit and round."""


class _Walk:
    """One recorded walk. The end of each instruction is the start of the next.

    `events` holds what happened inside an instruction, by its index in the list: a receive or sync that was waited for, or None
    for the time from which the instruction counts.
    """

    __slots__ = ("ends", "events", "instructions", "rounds", "start_s")

    def __init__(self, instructions: Sequence[Instruction], rounds: int) -> None:
        self.instructions, self.rounds = instructions, rounds
        self.ends: list[float] = []
        self.events: list[tuple[int, float, Instruction | Sync | None]] = []
        self.start_s = now()

    def records(self, watched: set[int]) -> Iterator[Record]:
        """Yields instructions with start and end, in the order of their ends. Receives and syncs without a wait are left out."""
        events = deque(self.events)
        under_way: dict[object, tuple[Instruction, float]] = {}
        begin = self.start_s
        for place, (instruction, end) in enumerate(zip(self.instructions, self.ends, strict=False)):
            while events and events[0][0] == place:
                _, moment, what = events.popleft()
                if what is None:
                    begin = moment
                elif (found := under_way.pop(id(what) if isinstance(what, Instruction) else what, None)) is not None:
                    yield (*found, moment)
                    begin = moment
            if instruction.receives:
                under_way[id(instruction)] = instruction, begin
            elif instruction.channel is None and instruction.action.op is Op.S and instruction.action.stage in watched:
                under_way[instruction.action.stage, instruction.round] = instruction, begin
            else:
                yield instruction, begin, end
            begin = end


class Trace:
    """The times of the instructions of one rank. All ranks set `clock` together, before the first walk.

    Walks that start while `on` is False are not recorded.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.on = True
        self._walks: list[_Walk] = []
        self._watched: set[int] = set()

    def clear(self) -> None:
        """Deletes all records. Walks are counted from 0 again."""
        self._walks.clear()

    def keep_last(self) -> None:
        """Deletes all walks except the last one, which becomes the first."""
        del self._walks[:-1]

    def walk(self, instructions: Sequence[Instruction], rounds: int) -> list[float]:
        """Starts a walk of some rounds. The caller appends the end of each instruction to the returned list."""
        self._walks.append(_Walk(instructions, rounds))
        return self._walks[-1].ends

    def begin(self) -> None:
        """Marks the start of the current instruction: its inputs have arrived."""
        self._note(None)

    def arrived(self, instruction: Instruction) -> None:
        """Marks the end of the wait for a receive."""
        self._note(instruction)

    def watch(self, unit: int) -> None:
        """Declares that `landed` will be called for the syncs of this unit."""
        self._watched.add(unit)

    def landed(self, unit: int, round_: int) -> None:
        """Marks the end of the wait for the sync of a unit. Calls after the first one do nothing."""
        self._note((unit, round_))

    def _note(self, what: Instruction | Sync | None) -> None:
        if not self.on:
            return
        walk = self._walks[-1]
        walk.events.append((len(walk.ends), now(), what))

    def spans(self, schedule: Schedule, mesh: Mesh) -> list[Span]:
        """Returns the records as spans on the common clock. Walks are numbered like rounds, and copies like more workers."""
        found: list[Span] = []
        before = 0
        for walk in self._walks:
            cells: dict[Entry, int] = {}
            for instruction, begin, end in walk.records(self._watched):
                start, stop = begin + self.clock.offset_s, end + self.clock.offset_s
                if instruction.entry in cells:
                    at = cells[instruction.entry]
                    found[at] = found[at]._replace(end_s=stop)
                    continue
                if isinstance(instruction.entry, Cell):
                    cells[instruction.entry] = len(found)
                found.append(
                    Span(mesh.seat, _lane(schedule, instruction), _placed(instruction.entry, schedule, mesh, before), start, stop)
                )
            before += walk.rounds
        return found


def gather(trace: Trace, schedule: Schedule, mesh: Mesh) -> Timeline | None:
    """Returns the spans of all ranks as one timeline on rank 0, and None elsewhere. All ranks call this together, after the run.

    Time 0 is the start of the first span. Worker w of data-parallel copy j is worker w + workers * j of the timeline. A
    tensor-parallel box acts as one worker: the spans are those of its coordinate 0.
    """
    own = trace.spans(schedule, mesh) if mesh.coordinate == 0 else []
    mine = [[s.lane.value, str(s.entry), s.start_s, s.end_s] for s in own]
    heard = gather_json(mine)
    if heard is None:
        return None
    spans = [
        [Span(seat, Lane(lane), parse(entry), start, end) for lane, entry, start, end in one]
        for seat, one in enumerate(heard[box[0]] for box in mesh.boxes)
    ]
    return assemble(spans, schedule)


def assemble(heard: Sequence[Sequence[Span]], schedule: Schedule, *, start_s: float | None = None) -> Timeline:
    """Returns one timeline from the spans of all ranks."""
    spans = [span for one in heard for span in one]
    zero = min((span.start_s for span in spans), default=0.0) if start_s is None else start_s
    moved = (span._replace(start_s=span.start_s - zero, end_s=span.end_s - zero) for span in spans)
    ordered = tuple(sorted(moved, key=lambda span: (span.start_s, span.worker)))
    return Timeline(schedule.name, len(heard), ordered, flush=schedule.flush)


def _placed(entry: Entry, schedule: Schedule, mesh: Mesh, rounds: int) -> Entry:
    """Returns an entry with its microbatch, round and peer numbered over the whole run, after this many earlier rounds."""
    if isinstance(entry, Transfer):
        entry = entry._replace(peer=mesh.seat_of(entry.peer))
    return entry.shifted(rounds * schedule.microbatches, rounds) if rounds else entry


def _lane(schedule: Schedule, instruction: Instruction) -> Lane:
    if instruction.channel is not None:
        return Lane.SEND if instruction.sends else Lane.RECEIVE
    return Lane.COLLECTIVE if collective(schedule, instruction.action) else Lane.COMPUTE
