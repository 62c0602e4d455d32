"""The proof: every law that a schedule must keep before anything runs.

`check` first counts what is there (`laws.py`), lowers what is not lowered, runs the lists with every send, receive and
collective blocking, and follows each copy of each value through that run. The first broken law comes back with the
worker, the action, the reason and a small grid; nothing is raised.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.ir.action import Entry, Kind, Transfer
from meshwright.ir.effects import ACTIVATIONS, CONSUMED
from meshwright.ir.grid import excerpt
from meshwright.ir.order import Blocked, Flow, Place, rendezvous
from meshwright.ir.schedule import Schedule
from meshwright.passes.comm import StuckError
from meshwright.passes.laws import Law, Violation, border, structure
from meshwright.passes.lower import lower


@dataclass(frozen=True)
class CheckResult:
    """The verdict: `ok`, or the law that is broken, by which action on which worker, and why."""

    ok: bool
    law: str | None = None
    worker: int | None = None
    action: str | None = None
    reason: str | None = None
    picture: str = ""
    peak_activations: tuple[int, ...] = ()
    receive_depth: int = 0

    def __str__(self) -> str:
        if self.ok:
            peaks = " ".join(map(str, self.peak_activations))
            return f"ok: no deadlock, every value in place; live activations {peaks}; {self.receive_depth} receives ahead at most"
        return f"{self.law}: worker {self.worker}, {self.action}: {self.reason}\n{self.picture}".rstrip()


def check(schedule: Schedule) -> CheckResult:
    """Prove a schedule, lowered or not; never raises for anything that a schedule can contain."""
    for violation in structure(schedule):
        return _broken(schedule, violation)
    for violation in border(schedule):
        return _broken(schedule, violation)
    if not schedule.lowered:
        try:
            schedule = lower(schedule)
        except StuckError as error:
            worker, index = error.place
            return _broken(schedule, Violation(Law.DEADLOCK, worker, index, schedule.lists[worker][index], error.what))
    events, blocked = rendezvous(schedule)
    if blocked is not None:
        return _broken(schedule, _deadlock(schedule, blocked))
    copies = _Copies(schedule)
    for event in events:
        if violation := copies.follow(event):
            return _broken(schedule, violation)
    if violation := copies.leftover():
        return _broken(schedule, violation)
    return CheckResult(True, peak_activations=tuple(copies.peak), receive_depth=copies.depth)


def _broken(schedule: Schedule, violation: Violation) -> CheckResult:
    action = None if violation.entry is None else str(violation.entry)
    picture = excerpt(schedule.lists, violation.worker, violation.index)
    return CheckResult(False, violation.law.value, violation.worker, action, violation.reason, picture)


class _Copies:
    """Each worker's live values, followed through a run: one copy at most, made by write or receive, ended by its reader."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.flow = flow = Flow(schedule)
        self.live: list[set[int]] = [set(values) for values in flow.initial]
        self.ends = [value.kind in CONSUMED for value in flow.values]
        self.counts = [value.kind in ACTIVATIONS for value in flow.values]
        self.ever = {value for values in flow.initial for value in values}
        self.now = [0] * schedule.workers
        self.peak = [0] * schedule.workers
        self.waiting: dict[tuple[int, int, Kind], set[int]] = defaultdict(set)
        self.depth = 0

    def follow(self, event: tuple[Place, ...]) -> Violation | None:
        """Apply one event: an action, both ends of a message, or a collective."""
        for worker, index in event:
            live = self.live[worker]
            reads, writes = self.flow.reads[worker][index], self.flow.writes[worker][index]
            for value in reads:
                if value not in live:
                    return self._unread(worker, index, value)
            for value in writes:
                if value in live:
                    reason = f"makes {self.flow.values[value]} while worker {worker} still holds it"
                    return Violation(Law.COPY, worker, index, self._entry(worker, index), reason)
            self._account(worker, index, reads, writes)
        return None

    def _account(self, worker: int, index: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        live = self.live[worker]
        for value in writes:
            live.add(value)
            self.now[worker] += self.counts[value]
        self.ever.update(writes)
        if self.now[worker] > self.peak[worker]:
            self.peak[worker] = self.now[worker]
        for value in reads:
            if self.ends[value]:
                live.discard(value)
                self.now[worker] -= self.counts[value]
        entry = self._entry(worker, index)
        if isinstance(entry, Transfer):
            if not entry.sends:
                queue = self.waiting[entry.peer, worker, entry.value.kind]
                queue.add(writes[0])
                self.depth = max(self.depth, len(queue))
        elif reads:
            self._used(worker, reads)

    def _used(self, worker: int, reads: tuple[int, ...]) -> None:
        for value in reads:
            kind = self.flow.values[value].kind
            if kind is Kind.ACT or kind is Kind.GRAD:
                for (_, target, channel), queue in self.waiting.items():
                    if target == worker and channel is kind:
                        queue.discard(value)

    def _unread(self, worker: int, index: int, value_id: int) -> Violation:
        value = self.flow.values[value_id]
        entry = self._entry(worker, index)
        verb = "sends" if isinstance(entry, Transfer) else "reads"
        law = Law.VERSION if value.kind is Kind.PARAM else Law.READ
        if value.kind is Kind.PARAM:
            why = f"version {value.version} of unit {value.stage} does not exist there yet"
        elif value_id in self.live_before(worker, index):
            why = "it has been used up by then"
        elif value_id in self.ever:
            why = f"worker {worker} has not received it"
        else:
            why = "it has not been made yet"
        return Violation(law, worker, index, entry, f"{verb} {value}, but {why}")

    def live_before(self, worker: int, index: int) -> set[int]:
        """What this worker has made or received earlier in its list."""
        return {value for values in self.flow.writes[worker][:index] for value in values}

    def leftover(self) -> Violation | None:
        """At the end of a step with a flush nothing may be left but parameters and sums."""
        for worker, live in enumerate(self.live):
            for value in live:
                if self.ends[value]:
                    index = self._writer(worker, value)
                    reason = f"makes {self.flow.values[value]}, which nobody uses"
                    return Violation(Law.LEFTOVER, worker, index, self._entry(worker, index), reason)
        return None

    def _writer(self, worker: int, value: int) -> int:
        return next(index for index, values in enumerate(self.flow.writes[worker]) if value in values)

    def _entry(self, worker: int, index: int) -> Entry:
        return self.flow.lists[worker][index]


def _deadlock(schedule: Schedule, blocked: Blocked) -> Violation:
    """The shortest ring of workers that wait for each other, or a worker that waits for one that has ended."""
    lists = schedule.lists
    for worker, index in sorted(blocked.at.items()):
        ended = [peer for peer in blocked.waits_for[worker] if peer not in blocked.at]
        if ended:
            entry = lists[worker][index]
            return Violation(_law(entry), worker, index, entry, f"waits for worker {ended[0]}, which has no partner for it")
    for worker, index in sorted(blocked.at.items()):
        crossed = _crossed(lists[worker][index], worker, blocked, schedule)
        if crossed:
            return Violation(Law.CHANNEL, worker, index, lists[worker][index], crossed)
    ring = min((c for w in blocked.at if (c := _cycle(blocked, w))), key=len)
    waits = ", ".join(f"worker {w} at {lists[w][blocked.at[w]]}" for w in ring)
    worker = ring[0]
    entry = lists[worker][blocked.at[worker]]
    return Violation(_law(entry), worker, blocked.at[worker], entry, f"these wait for each other: {waits}")


def _law(entry: Entry) -> Law:
    return Law.DEADLOCK if isinstance(entry, Transfer) else Law.COLLECTIVE


def _crossed(entry: Entry, worker: int, blocked: Blocked, schedule: Schedule) -> str | None:
    """Two workers at a message for each other in the same direction, but not at the same one."""
    if not isinstance(entry, Transfer) or entry.peer not in blocked.at:
        return None
    other = schedule.lists[entry.peer][blocked.at[entry.peer]]
    if not isinstance(other, Transfer) or other.peer != worker or other.sends == entry.sends:
        return None
    verbs = ("sends", "receives") if entry.sends else ("receives", "sends")
    return f"{verbs[0]} {entry.value} where worker {entry.peer} {verbs[1]} {other.value}"


def _cycle(blocked: Blocked, start: int) -> list[int] | None:
    """The shortest way from a worker back to itself along who waits for whom."""
    parent: dict[int, int] = {}
    queue = deque([start])
    while queue:
        worker = queue.popleft()
        for peer in blocked.waits_for.get(worker, ()):
            if peer == start:
                return list(_path(parent, start, worker))
            if peer not in parent:
                parent[peer] = worker
                queue.append(peer)
    return None


def _path(parent: dict[int, int], start: int, worker: int) -> Iterator[int]:
    steps = [worker]
    while steps[-1] != start:
        steps.append(parent[steps[-1]])
    return reversed(steps)

