"""The names of the laws, and the error for a broken one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Entry
from meshwright.ir.schedule import Schedule


class Law(StrEnum):
    """A law that every schedule must keep; users see the value."""

    PLACEMENT = "placement"  # an action is on a worker that holds its stage
    ONCE = "once"  # F once, then B once or I then W once; S, N and U once per round; or only F everywhere
    ORDER = "order"  # F before R before B or I before W, and N before its updates, in the worker's own list
    VERSION = "version"  # read no version before it exists; a backward reads its forward's; with a flush none is stale
    UNIT = "unit"  # every parameter is in exactly one unit
    READ = "read"  # every read finds exactly one live copy of the value, on this worker
    COPY = "copy"  # at most one copy of a value per worker
    LEFTOVER = "leftover"  # a step with a flush leaves no unused value
    MESSAGE = "message"  # only values that a run can carry are sent, from the worker that makes them to their reader
    REDUCTION = "reduction"  # a weight gradient enters one reduction over all contributors; every holder gets the sum
    DEADLOCK = "deadlock"  # no cycle when every send and receive blocks in list order
    CHANNEL = "channel order"  # send order equals receive order on every channel
    COLLECTIVE = "collective order"  # all members issue their collectives in the same order
    BORDER = "border"  # the values alive at the border of two periods are the same, one period later


@dataclass(frozen=True)
class Violation:
    """A broken law and where it was found."""

    law: Law
    worker: int
    index: int
    entry: Entry | None
    reason: str


def broken(
    schedule: Schedule, law: str | None, worker: int | None, entry: Entry | str | None, reason: str | None
) -> MeshwrightError:
    """Returns the error for a schedule that breaks a law, for callers other than `check`."""
    where = "" if entry is None else f" at {entry} on worker {worker}"
    return MeshwrightError(f"{schedule.name} breaks the law of {law}{where}: {reason}", fix="meshwright check")


class LawError(MeshwrightError):
    """A lowered schedule breaks a law; `schedule` is the lowered result."""

    def __init__(self, schedule: Schedule, violation: Violation) -> None:
        error = broken(schedule, violation.law.value, violation.worker, violation.entry, violation.reason)
        super().__init__(error.what, fix="meshwright check")
        self.schedule, self.violation = schedule, violation
