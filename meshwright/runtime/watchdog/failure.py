"""What a rank does and what went wrong first: plain data that crosses processes as JSON, and the text that users read.

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
    """What one rank is doing. `peer` and `waits` say whom it waits for and in what; `where` is the user's line it is in.

    `over`: it has finished. `last`: it has learnt of a failure and says nothing more.
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

    @property
    def inside(self) -> bool:
        """Whether others may depend on what it does: it walks a schedule, or it waits for them."""
        return not self.over and bool(self.action or self.waits)

    def __str__(self) -> str:
        if self.over:
            return f"rank {self.rank}: finished"
        parts = [self.action or "outside a schedule"]
        if self.waits:
            whom = "other ranks" if self.peer is None else f"rank {self.peer}"
            parts.append(f"waits for {whom} ({self.waits})")
        elif self.where:
            parts.append(f"at {self.where}")
        return f"rank {self.rank}: {', '.join(parts)}, {self.still_s:.1f} s"

    def to_json(self) -> str:
        """The form that goes through a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Doing:
        """Back from it; a ValueError where it is anything else."""
        return cls(**_fields(cls, text))


def _fields(kind: type, text: str | bytes) -> dict[str, Any]:
    """The fields of a record, each of its own type: a store may hold what others wrote."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    kinds = {f.name: _KINDS[str(f.type)] for f in fields(kind)}
    if not isinstance(found, dict) or set(found) != set(kinds):
        raise ValueError(f"it has not the fields of {kind.__name__}")
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
"""What JSON may have for the types of fields."""

LONGEST = 20_000
"""Characters of a text that go through a store, which takes no message of any size."""


def _short(text: str) -> str:
    """The two ends of what is too long."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


class FailureKind(StrEnum):
    """In what way a rank failed."""

    RAISED = "failed"
    DIED = "died"
    STOPPED = "was stopped"
    HUNG = "hangs"


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong, and where. A `clean` one is a user's mistake found outside any action."""

    rank: int
    how: FailureKind
    what: str
    action: str = ""
    stage: int | None = None
    fix: str | None = None
    detail: str = ""
    clean: bool = False
    noticed_by: int | None = None

    @classmethod
    def of(cls, error: BaseException, doing: Doing) -> Failure:
        """What an exception on a rank means."""
        if isinstance(error, KeyboardInterrupt):
            return cls(doing.rank, FailureKind.STOPPED, "interrupted by Ctrl-C", doing.action, doing.stage)
        place = doing.action, doing.stage
        if isinstance(error, MeshwrightError):
            return cls(doing.rank, FailureKind.RAISED, _short(error.what), *place, fix=error.fix, clean=not doing.action)
        what, detail = f"{type(error).__name__}: {error}".rstrip(": "), "".join(traceback.format_exception(error))
        return cls(doing.rank, FailureKind.RAISED, _short(what), *place, detail=_short(detail))

    @classmethod
    def seen(cls, how: FailureKind, what: str, doing: Doing, **more: Any) -> Failure:
        """What others noticed about a rank that cannot speak for itself."""
        return cls(doing.rank, how, what, doing.action, doing.stage, **more)

    def __str__(self) -> str:
        if self.clean:
            return self.what
        place = f" in {self.action}" if self.action else ""
        if self.action and self.stage is not None:
            place += f" (stage {self.stage})"
        return f"rank {self.rank} {self.how.value}{place}: {self.what}"

    def to_json(self) -> str:
        """The form that goes through a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Back from it; a ValueError where it is anything else."""
        found = _fields(cls, text)
        return cls(**{**found, "how": FailureKind(found["how"])})


class RankFailed(MeshwrightError):
    """A run that ended because of one rank: its failure, and what the others were doing then."""

    def __init__(self, failure: Failure, others: Sequence[Doing] = ()) -> None:
        super().__init__(describe(failure, others), fix=failure.fix)
        self.failure, self.others = failure, tuple(others)
        self.rank, self.stage, self.action = failure.rank, failure.stage, failure.action

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (self.failure, self.others)


def as_error(failure: Failure, others: Sequence[Doing] = ()) -> MeshwrightError:
    """The exception for a failure; a user's mistake comes out as it was raised."""
    return MeshwrightError(failure.what, fix=failure.fix) if failure.clean else RankFailed(failure, others)


def describe(failure: Failure, others: Sequence[Doing]) -> str:
    """The failure, a line for every other rank, and the traceback if there is one."""
    lines = [str(failure), *(f"  {doing}" for doing in others if doing.rank != failure.rank)]
    if failure.detail:
        lines.append(failure.detail.rstrip())
    return "\n".join(lines)
