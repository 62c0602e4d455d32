"""The proof: checks every law that a schedule must keep before anything runs.

`check` first counts actions (`laws.py`), lowers the schedule if needed, runs the lists with every send, receive and
collective blocking, and follows each copy of each value through that run. It does not raise: it returns the first broken law
with the worker, the action, the reason and a small grid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Entry, Transfer
from meshwright.ir.analysis.order import Blocked, Flow, Place, no_collection, rendezvous
from meshwright.ir.schedule import Schedule
from meshwright.ir.text_grid import excerpt
from meshwright.passes.laws import border, structure
from meshwright.passes.lower import lowered_flow
from meshwright.passes.messages import StuckError
from meshwright.passes.reduction_law import reduced
from meshwright.passes.value_copies import ValueCopies
from meshwright.passes.violation import Law, LawError, Violation, broken
from meshwright.passes.wellformed import faults


@dataclass(frozen=True)
class CheckResult:
    """The verdict of `check`.

    Attributes:
        ok: Whether every law holds.
        law: The law that is broken; None if none is.
        worker: The worker whose action breaks it.
        action: That action, as text.
        reason: Why it breaks the law.
        picture: The lists around it, with an arrow.
        peak_activations: For each worker the most microbatches whose activations it holds at once.
        receive_depth: How many messages wait for one worker at most.

    Examples:
        >>> import meshwright as mw
        >>> result = mw.check(mw.schedules.build("onef1b", workers=4, microbatches=8))
        >>> result.ok, result.peak_activations
        (True, (4, 3, 2, 1))
    """

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
        where = "" if self.action is None else f" worker {self.worker}, {self.action}:"
        return f"{self.law}:{where} {self.reason}\n{self.picture}".rstrip()


@no_collection()
def check(schedule: Schedule) -> CheckResult:
    """Prove a schedule: no deadlock, and every value in its place.

    Every send, receive and collective may block in list order and the schedule still ends. Every value exists where it is
    read. Every weight gradient enters one reduction over exactly its contributors. A schedule that is not lowered is
    lowered first; its period is checked so that it can repeat.

    Args:
        schedule: The schedule, lowered or not.

    Returns:
        The verdict. A broken law does not raise: it comes back with the worker, the action and the reason.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("gpipe", workers=2, microbatches=2)
        >>> broken = schedule.with_lists((schedule.lists[0][1:], schedule.lists[1]))
        >>> result = mw.check(broken)
        >>> result.ok, result.worker, result.action
        (False, 0, '0B0')
    """
    if not isinstance(schedule, Schedule):
        return CheckResult(False, Law.PLACEMENT.value, reason=f"this is not a schedule but {type(schedule).__name__}")
    for fault in faults(schedule):  # there are no lists to draw
        return CheckResult(False, Law.PLACEMENT.value, reason=fault)
    result = _proved(schedule)
    if result.ok and schedule.period and not schedule.repeats:
        again = _proved(schedule.repeated(2))
        return result if again.ok else again
    return result


def prove(schedule: Schedule) -> Schedule:
    """Proves a schedule and returns it with the digest of its proof. Raises if a law is broken.

    A schedule that carries its own valid proof is not proved again. `dataclasses.replace` keeps the digest, but the digest no
    longer matches changed lists.
    """
    if schedule.proof and schedule.proof == schedule.digest:
        return schedule
    if not (found := check(schedule)).ok:
        raise broken(schedule, found.law, found.worker, found.action, found.reason)
    return replace(schedule, proof=schedule.digest)


def proved_run(schedule: Schedule, flow: Flow) -> list[tuple[Place, ...]]:
    """Proves a schedule in the form to which it was lowered, and returns its blocking run. Raises if a law is broken."""
    for violation in chain(structure(schedule), border(schedule)):
        found = _broken(schedule, violation)
        raise broken(schedule, found.law, found.worker, found.action, found.reason)
    found, events = _followed(flow)
    if not found.ok:
        raise broken(flow.schedule, found.law, found.worker, found.action, found.reason)
    return events


def refuse_unproved(schedule: Schedule) -> None:
    """Raises if an already lowered schedule breaks a law. Lowering itself makes schedules that keep the laws."""
    if schedule.lowered:
        prove(schedule)


def _proved(schedule: Schedule) -> CheckResult:
    """Checks the structure, then the period borders, then the blocking run."""
    for violation in chain(structure(schedule), border(schedule)):
        return _broken(schedule, violation)
    try:
        flow = lowered_flow(schedule, checked=True)
    except StuckError as error:
        drawn = schedule if error.entry in schedule.lists[error.worker] else error.schedule
        index = drawn.lists[error.worker].index(error.entry)
        return _broken(drawn, Violation(Law.DEADLOCK, error.worker, index, error.entry, error.what))
    except LawError as error:
        return _broken(error.schedule, error.violation)
    except MeshwrightError as error:
        return _broken(schedule, Violation(Law.CHANNEL, 0, 0, None, error.what))
    return _followed(flow)[0]


def _followed(flow: Flow) -> tuple[CheckResult, list[tuple[Place, ...]]]:
    """Runs lowered lists with everything blocking, and follows each copy of each value; returns that run, too."""
    events, blocked = rendezvous(flow.schedule)
    if blocked is not None:
        return _broken(flow.schedule, _deadlock(flow.schedule, blocked)), events
    copies = ValueCopies(flow)
    for event in events:
        if broken := copies.follow(event):
            return _broken(flow.schedule, broken), events
    for violation in chain(copies.leftover(), reduced(flow, events)):
        return _broken(flow.schedule, violation), events
    return CheckResult(True, peak_activations=tuple(copies.peak), receive_depth=copies.depth), events


def _broken(schedule: Schedule, violation: Violation) -> CheckResult:
    action = None if violation.entry is None else str(violation.entry)
    picture = excerpt(schedule.lists, violation.worker, violation.index)
    return CheckResult(False, violation.law.value, violation.worker, action, violation.reason, picture)


def _deadlock(schedule: Schedule, blocked: Blocked) -> Violation:
    """Returns the shortest cycle of workers that wait for each other, or a worker that waits for one that has finished."""
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
    """Returns a reason if two workers are at messages to each other, one sending and one receiving, but of different values."""
    if not isinstance(entry, Transfer) or entry.peer not in blocked.at:
        return None
    other = schedule.lists[entry.peer][blocked.at[entry.peer]]
    if not isinstance(other, Transfer) or other.peer != worker or other.sends == entry.sends:
        return None
    verbs = ("sends", "receives") if entry.sends else ("receives", "sends")
    return f"{verbs[0]} {entry.value} where worker {entry.peer} {verbs[1]} {other.value}"


def _cycle(blocked: Blocked, start: int) -> list[int] | None:
    """Returns the shortest cycle from a worker back to itself in the graph of who waits for whom."""
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
