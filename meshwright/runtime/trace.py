"""What really happened on one rank: begin and end of every action, message and sync; off unless asked for.

    action    from when its inputs were there to its end
    send      from start to when the transport has taken it
    receive   from its post to the end of the wait for it, at first use
    sync      from its launch to the end of the wait for it

Times are those of the host. On a GPU that is when work was launched, not when it ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from meshwright.ir.action import Cell, Entry, Op, Transfer
from meshwright.ir.effects import collective
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Lane, Span, Timeline
from meshwright.runtime.clock import Clock, now
from meshwright.runtime.edges import Pending
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.program import Step

Record = tuple[Step, float, float]
"""Step, begin, end."""


class Trace:
    """Times of the steps of one rank, as they come. `clock` is set before the first walk, on all ranks together."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.records: list[Record] = []
        self._walks: list[int] = []  # where each begins in the records
        self._begin = 0.0
        self._watched: set[int] = set()
        self._launched: dict[tuple[int, int], tuple[Step, float]] = {}

    def clear(self) -> None:
        """Forget what was recorded; walks are counted from 0 again."""
        self.records.clear()
        self._launched.clear()
        self._walks.clear()

    def walk(self) -> None:
        """A walk through the list starts."""
        self._walks.append(len(self.records))
        self._begin = now()

    def begin(self) -> None:
        """The step that is under way begins here: it has what it waited for."""
        self._begin = now()

    def end(self, step: Step) -> None:
        """A step ends and the next one begins; a sync that somebody will wait for stays open."""
        begin, self._begin = self._begin, now()
        if self._watched and step.action.op is Op.S and step.action.stage in self._watched:
            self._launched[step.action.stage, step.round] = step, begin
        else:
            self.records.append((step, begin, self._begin))

    def posted(self, step: Step, pending: Pending) -> None:
        """A receive was posted; its record comes when it has been waited for."""
        pending.arrived = self._close, step, self._begin
        self._begin = now()

    def watch(self, unit: int) -> None:
        """Somebody will say when the syncs of this unit have been waited for."""
        self._watched.add(unit)

    def landed(self, unit: int, round_: int) -> None:
        """The sync of a unit has been waited for; calls after the first do nothing."""
        if (found := self._launched.pop((unit, round_), None)) is not None:
            self._close(*found)

    def _close(self, step: Step, begin: float) -> None:
        self._begin = now()
        self.records.append((step, begin, self._begin))

    def spans(self, schedule: Schedule, mesh: Mesh) -> list[Span]:
        """The records as spans on the common clock; walks follow each other like rounds, copies are further workers."""
        found: list[Span] = []
        ends = [*self._walks[1:], len(self.records)]
        for walk, (first, last) in enumerate(zip(self._walks, ends, strict=True)):
            cells: dict[Entry, int] = {}
            for step, begin, end in self.records[first:last]:
                start, stop = begin + self.clock.offset_s, end + self.clock.offset_s
                if step.entry in cells:
                    at = cells[step.entry]
                    found[at] = found[at]._replace(end_s=stop)
                    continue
                if isinstance(step.entry, Cell):
                    cells[step.entry] = len(found)
                found.append(Span(mesh.rank, _lane(schedule, step), _placed(step.entry, schedule, mesh, walk), start, stop))
        return found


def gather(trace: Trace, schedule: Schedule, mesh: Mesh, *, start_s: float | None = None) -> Timeline | None:
    """All ranks' spans as one timeline on rank 0, None elsewhere; all ranks call this together, after the run.

    Time 0 is `start_s`, or the first begin of all. Worker w of copy j is worker w + workers * j of the timeline.
    """
    world = mesh.workers * mesh.copies
    heard: list[list[Span]] | None = [[] for _ in range(world)] if mesh.rank == 0 else None
    dist.gather_object(trace.spans(schedule, mesh), heard)
    return None if heard is None else assemble(heard, schedule, start_s=start_s)


def assemble(heard: Sequence[Sequence[Span]], schedule: Schedule, *, start_s: float | None = None) -> Timeline:
    """One timeline from the spans of all ranks."""
    spans = [span for one in heard for span in one]
    zero = min((span.start_s for span in spans), default=0.0) if start_s is None else start_s
    moved = (span._replace(start_s=span.start_s - zero, end_s=span.end_s - zero) for span in spans)
    ordered = tuple(sorted(moved, key=lambda span: (span.start_s, span.worker)))
    return Timeline(schedule.name, len(heard), ordered, flush=schedule.flush)


def _placed(entry: Entry, schedule: Schedule, mesh: Mesh, walk: int) -> Entry:
    """An entry as it is called in the whole run."""
    if isinstance(entry, Transfer):
        entry = entry._replace(peer=mesh.rank_of(entry.peer))
    rounds = walk * schedule.steps
    return entry.shifted(rounds * schedule.microbatches, rounds) if rounds else entry


def _lane(schedule: Schedule, step: Step) -> Lane:
    if step.channel is not None:
        return Lane.SEND if step.sends else Lane.RECEIVE
    return Lane.COLLECTIVE if collective(schedule, step.action) else Lane.COMPUTE
