"""Records of what a rank does and of the first failure. They are sent as JSON, and they make the text that users read.

rank 1 failed in 1B0 (stage 1): ValueError: bad weights
  rank 0: 0B0, waits for rank 1 (grad 1->0), 1.2 s
  rank 2: finished
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class Doing:
    """What one rank is doing.

    `peer` is the rank that it waits for, `waits` is the message or collective, and `where` is the current line of user code.
    `over`: the rank has finished. `last`: this is its final report after a failure. `worker` is set if the plan maps workers to
    ranks.
    """

    rank: int
    beat: int = 0
    action: str = ""
    stage: int | None = None
    peer: int | None = None
    waits: str = ""
    where: str = ""
    still_s: float = 0.0
    over: bool = False
    last: bool = False
    home: str = ""
    pid: int = 0
    born: int = 0
    worker: int | None = None

    @property
    def inside(self) -> bool:
        """True if other ranks may depend on this one: it walks a schedule or waits for them."""
        return not self.over and bool(self.action or self.waits)

    def __str__(self) -> str:
        if self.over:
            return f"{self.name}: finished"
        parts = [self.action or "outside a schedule"]
        if self.waits:
            whom = "other ranks" if self.peer is None else f"rank {self.peer}"
            parts.append(f"waits for {whom} ({self.waits})")
        elif self.where:
            parts.append(f"at {self.where}")
        return f"{self.name}: {', '.join(parts)}, {self.still_s:.1f} s"

    @property
    def name(self) -> str:
        """The rank as text, with its worker if it has another number."""
        return _name(self.rank, self.worker)

    def to_json(self) -> str:
        """Returns the record as JSON for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Doing:
        """Reads a record from JSON. Raises ValueError if the text is not one."""
        return cls(**_fields(cls, text))


def _name(rank: int, worker: int | None) -> str:
    return f"rank {rank}" if worker is None else f"rank {rank} (worker {worker})"


def _fields(kind: type, text: str | bytes) -> dict[str, Any]:
    """Reads the fields of a record and checks the type of each, because other programs can write to the store."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    kinds = {f.name: _KINDS[str(f.type)] for f in fields(kind)}
    if not isinstance(found, dict) or set(found) != set(kinds):
        raise ValueError(f"it does not have the fields of {kind.__name__}")
    for name, value in found.items():
        if type(value) not in kinds[name]:
            raise ValueError(f"{name} is a {type(value).__name__}")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"{name} is too large")
    return found


_LARGEST = 1 << 62
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "float": (float, int),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
    "FailureKind": (str,),
}
"""The Python types that JSON may contain for each field type."""

LONGEST = 20_000
"""The maximum number of characters of a text in the store. The store does not take messages of any size."""


def _short(text: str) -> str:
    """Returns the text, or its beginning and end if it is too long."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


class FailureKind(StrEnum):
    """How a rank failed."""

    RAISED = "failed"
    DIED = "died"
    STOPPED = "was stopped"
    HUNG = "hangs"


@dataclass(frozen=True)
class Failure:
    """The first failure of a job, and where it happened. A `clean` one is a user's mistake that was found outside any action."""

    rank: int
    how: FailureKind
    what: str
    action: str = ""
    stage: int | None = None
    fix: str | None = None
    detail: str = ""
    clean: bool = False
    noticed_by: int | None = None
    worker: int | None = None

    @classmethod
    def of(cls, error: BaseException, doing: Doing) -> Failure:
        """Returns the failure for an exception on a rank."""
        if isinstance(error, KeyboardInterrupt):
            return cls.seen(FailureKind.STOPPED, "interrupted by Ctrl-C", doing)
        if isinstance(error, MeshwrightError):
            return cls.seen(FailureKind.RAISED, _short(error.what), doing, fix=error.fix, clean=not doing.action)
        what, detail = f"{type(error).__name__}: {error}".rstrip(": "), "".join(traceback.format_exception(error))
        return cls.seen(FailureKind.RAISED, _short(what), doing, detail=_short(detail))

    @classmethod
    def seen(cls, how: FailureKind, what: str, doing: Doing, **more: Any) -> Failure:
        """Returns the failure of a rank in the middle of what it did."""
        return cls(doing.rank, how, what, doing.action, doing.stage, worker=doing.worker, **more)

    def __str__(self) -> str:
        if self.clean:
            return self.what
        place = f" in {self.action}" if self.action else ""
        if self.action and self.stage is not None:
            place += f" (stage {self.stage})"
        return f"{_name(self.rank, self.worker)} {self.how.value}{place}: {self.what}"

    def to_json(self) -> str:
        """Returns the record as JSON for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Reads a record from JSON. Raises ValueError if the text is not one."""
        found = _fields(cls, text)
        return cls(**{**found, "how": FailureKind(found["how"])})


class RankFailed(MeshwrightError):
    """A run that ended because one rank failed: the failure, and what the other ranks were doing at that time."""

    def __init__(self, failure: Failure, others: Sequence[Doing] = ()) -> None:
        super().__init__(describe(failure, others), fix=failure.fix)
        self.failure, self.others = failure, tuple(others)
        self.rank, self.stage, self.action = failure.rank, failure.stage, failure.action

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (self.failure, self.others)


def as_error(failure: Failure, others: Sequence[Doing] = ()) -> MeshwrightError:
    """Returns the exception for a failure. A user's mistake becomes the same `MeshwrightError` that the rank raised."""
    return MeshwrightError(failure.what, fix=failure.fix) if failure.clean else RankFailed(failure, others)


def describe(failure: Failure, others: Sequence[Doing]) -> str:
    """Returns the failure, one line for every other rank, and the traceback if there is one."""
    lines = [str(failure), *(f"  {doing}" for doing in others if doing.rank != failure.rank)]
    if failure.detail:
        lines.append(failure.detail.rstrip())
    return "\n".join(lines)
