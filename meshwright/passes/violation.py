"""The names of the laws, and what is said where one is broken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Entry
from meshwright.ir.schedule import Schedule


class Law(StrEnum):
    """What a schedule must keep; the value is what users see."""

    PLACEMENT = "placement"  # an action stands on a worker that holds its stage
    ONCE = "once"  # F once, then B once or I then W once; S, N and U once per round; or F alone everywhere
    ORDER = "order"  # F before R before B or I before W, and N before its updates, in the worker's own list
    VERSION = "version"  # no version is read before it exists; a backward reads its forward's; with a flush none is stale
    UNIT = "unit"  # every parameter lives in exactly one unit
    READ = "read"  # every read has exactly one live copy, on this worker
    COPY = "copy"  # at most one copy of a value per worker
    LEFTOVER = "leftover"  # a step with a flush leaves nothing behind
    MESSAGE = "message"  # between workers goes what a run can carry, from who makes it to who reads it
    REDUCTION = "reduction"  # a weight gradient enters one reduction over all who add to it; every holder gets the sum
    DEADLOCK = "deadlock"  # no cycle when every send and receive blocks in list order
    CHANNEL = "channel order"  # send order equals receive order on every channel
    COLLECTIVE = "collective order"  # all members issue their collectives in one order
    BORDER = "border"  # what is alive at the border of two periods is the same, one period later


@dataclass(frozen=True)
class Violation:
    """A broken law and where it is seen."""

    law: Law
    worker: int
    index: int
    entry: Entry | None
    reason: str


def broken(
    schedule: Schedule, law: str | None, worker: int | None, entry: Entry | str | None, reason: str | None
) -> MeshwrightError:
    """What is raised where a schedule breaks a law and something else than its proof was asked for."""
    where = "" if entry is None else f" at {entry} on worker {worker}"
    return MeshwrightError(f"{schedule.name} breaks the law of {law}{where}: {reason}", fix="meshwright check")


class LawError(MeshwrightError):
    """A law that is broken by what lowering made of a schedule; `schedule` is the result that breaks it."""

    def __init__(self, schedule: Schedule, violation: Violation) -> None:
        error = broken(schedule, violation.law.value, violation.worker, violation.entry, violation.reason)
        super().__init__(error.what, fix="meshwright check")
        self.schedule, self.violation = schedule, violation
