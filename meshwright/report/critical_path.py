"""The critical path of a step, measured or predicted, and what its workers wait for.

The path is followed backwards from the last end, through the simulator's graph. An action could start when its worker was
free and its inputs were sent. If it started later than both, a message or a sync caused the delay.

    stages   seconds that stages compute on the path
    links    seconds that messages between two workers delay the path
    sync_s   seconds that collectives and updates delay the path
    host_s   gaps that nothing else explains
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.ir.action import COMPUTE, Action, Kind, Transfer, actions
from meshwright.ir.analysis.effects import collective
from meshwright.ir.analysis.order import JOINT
from meshwright.ir.timeline import Lane, Timeline
from meshwright.simulate.event_graph import EventGraph, Message


class Wait(NamedTuple):
    """How long a worker waited in a step for one kind of value from another worker (source None: for a sync)."""

    worker: int
    source: int | None
    kind: str
    seconds: float


class CriticalPath:
    """The path over the nodes of the simulator's graph, per data-parallel copy; `waits` has all waits, longest first."""

    def __init__(self, program: EventGraph, timeline: Timeline) -> None:
        self.program, self.copies = program, timeline.workers // program.schedule.workers
        self.stages: dict[int, float] = defaultdict(float)
        self.links: dict[tuple[int, int], float] = defaultdict(float)
        self.sync_s = self.host_s = 0.0
        self._last: dict[int, tuple[float, int, int]] = {}
        self._read(timeline)
        self.waits = tuple(self._waits())
        self._walk()

    def _read(self, timeline: Timeline) -> None:
        """Reads begin and end of every node in every data-parallel copy, per member for a collective."""
        workers, lists = self.program.schedule.workers, self.program.flow.lists
        times = {(s.worker, s.lane is Lane.RECEIVE, _text(s.entry)): (s.start_s, s.end_s) for s in timeline.spans}
        self.times: list[list[list[tuple[float, float]]]] = []
        for copy in range(self.copies):
            nodes = []
            for places in self.program.places:
                found = []
                for number, (worker, index) in enumerate(places):
                    entry = lists[worker][index]
                    key = worker + workers * copy, isinstance(entry, Transfer) and not entry.sends, _text(entry)
                    if key not in times and number == 0:
                        raise MeshwrightError(
                            f"the timeline has no {entry} of worker {key[0]}", fix="use a timeline of this schedule"
                        )
                    found.append(times.get(key, (0.0, 0.0)))
                nodes.append(found)
            self.times.append(nodes)
        self.step_s = timeline.makespan_s

    def _is_compute(self, node: int) -> bool:
        what = self._what(node)
        joint = isinstance(what, Action) and (what.op in JOINT and bool(collective(self.program.schedule, what)))
        return not joint and not isinstance(what, Message)

    def _sent(self, copy: int, node: int) -> tuple[float, int, int]:
        """Returns when a message was sent, or when the last member of a collective was free; with that copy and place."""
        if isinstance(self._what(node), Message):
            return self.times[copy][node][0][0], copy, 0
        if node not in self._last:
            members = enumerate(self.program.places[node])
            free = [(self._before(c, node, worker)[0], c, n) for n, (worker, _) in members for c in range(self.copies)]
            self._last[node] = max(free)
        return self._last[node]

    def _what(self, node: int) -> Any:
        return self.program.classes[self.program.class_of[node]][1]

    def _before(self, copy: int, node: int, worker: int) -> tuple[float, int | None, int | None]:
        """Returns when the worker of a node was free, its previous node, and the input that was sent last."""
        free, last, inputs = 0.0, None, []
        for other in self.program.waits[node]:
            if not self._is_compute(other):
                members = self.program.places[other]
                if worker in [w for w, _ in (members[1:] if isinstance(self._what(other), Message) else members)]:
                    inputs.append(other)
            elif self.program.places[other][0][0] == worker and self.times[copy][other][0][1] >= free:
                free, last = self.times[copy][other][0][1], other
        return free, last, max(inputs, key=lambda n: self._sent(copy, n)[0], default=None)

    def _waits(self) -> Iterable[Wait]:
        """Returns what workers wait for, by worker, source and kind, longest first."""
        found: dict[tuple[int, int | None, str], float] = defaultdict(float)
        for copy in range(self.copies):
            for node, places in enumerate(self.program.places):
                worker = places[0][0]
                if not self._is_compute(node):
                    continue
                free, _, late = self._before(copy, node, worker)
                if late is not None and (gap := self.times[copy][node][0][0] - free) > 0:
                    source, kind = self._named(late)
                    found[worker + copy * self.program.schedule.workers, source, kind] += gap
        return sorted((Wait(*key, seconds) for key, seconds in found.items()), key=lambda wait: -wait.seconds)

    def _named(self, node: int) -> tuple[int | None, str]:
        """Returns the sender of a message and what it carries; a sync has no sender."""
        places = self.program.places[node]
        if isinstance(what := self._what(node), Message):
            return places[0][0], {Kind.ACT: "activations", Kind.GRAD: "gradients"}.get(what.value.kind, what.value.kind.value)
        return None, "the sync of gradients"

    def _walk(self) -> None:
        """Follows the path backwards from the last end of a computation."""
        ends = [(t[0][1], c, n) for c, nodes in enumerate(self.times) for n, t in enumerate(nodes) if self._is_compute(n)]
        end, copy, node = max(ends, default=(0.0, 0, 0))
        self.host_s += self.step_s - end
        at: tuple[int, int, int] | None = (copy, node, 0) if ends else None
        while at is not None:
            at = self._step_back(*at)

    def _step_back(self, copy: int, node: int, place: int) -> tuple[int, int, int] | None:
        """Accounts for a node and the delay before it. Returns the previous node on the path."""
        begin, end = self.times[copy][node][place]
        worker = self.program.places[node][place][0]
        if self._is_compute(node):
            done = actions(self.program.flow.lists[worker][self.program.places[node][0][1]])
            for action in done:
                if action.op in COMPUTE:
                    self.stages[action.stage] += (end - begin) / len(done)
                else:
                    self.sync_s += (end - begin) / len(done)
        free, last, late = self._before(copy, node, worker)
        sent, other, member = (0.0, copy, 0) if late is None else self._sent(copy, late)
        if late is not None and sent > free:
            self._charge(late, max(0.0, begin - sent))
            return other, late, member
        if last is None and late is None:
            self.host_s += begin
            return None
        self._charge(late if self._is_compute(node) else node, max(0.0, begin - free))
        return None if last is None else (copy, last, 0)

    def _charge(self, node: int | None, seconds: float) -> None:
        """Adds seconds of delay to a link, to the syncs, or (None) to the host."""
        if node is None:
            self.host_s += seconds
        elif isinstance(self._what(node), Message):
            source, target = (worker for worker, _ in self.program.places[node])
            self.links[source, target] += seconds
        else:
            self.sync_s += seconds


def _text(entry: Any) -> str:
    """Returns a text for an entry. A transfer is identified by its value only, because its peer is a rank in a measured run."""
    return str(entry.value) if isinstance(entry, Transfer) else str(entry)
