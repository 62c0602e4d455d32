"""What a plan must respect: how rows are split among the devices of a stage, memory, and what a user asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.layer_costs import Profile


class SplitRows(StrEnum):
    """May the devices that share a stage get unequal numbers of rows?"""

    EVEN = "even"  # the number of devices divides the rows of a microbatch
    UNEVEN = "uneven"  # there are at least as many rows as devices
    IGNORE = "ignore"  # rows are not looked at


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The rows of a microbatch, None if they are not known, how they may be split, and what a plan has to be.

    `schedule`, `pp` and `dp` fix a choice; `seconds` ends a search early. `explain` asks for rivals and flip points. A search
    calls `progress` with the share of its work that is done, and with what it has found in words.
    """

    rows: int | None = None
    split_rows: SplitRows = SplitRows.IGNORE
    memory_free: bool = False
    schedule: str | None = None
    pp: int | None = None
    dp: int | None = None
    tensor: bool = True
    seconds: float = float("inf")
    explain: bool = False
    progress: Callable[[float, str], None] | None = None

    def allows(self, width: int) -> bool:
        """Returns whether so many devices may share a stage."""
        if self.rows is None or self.split_rows is SplitRows.IGNORE:
            return True
        return self.rows % width == 0 if self.split_rows is SplitRows.EVEN else width <= self.rows


@dataclass(frozen=True)
class Asked:
    """A whole question to a planner."""

    profile: Profile
    cluster: Cluster
    microbatches: int | None
    batch: int | None
    limits: PlanLimits


class NothingFitsError(MeshwrightError):
    """No plan fits into the memory of the devices. `needed_bytes` is the least memory of a device with which one does."""

    def __init__(self, what: str, *, fix: str, needed_bytes: float) -> None:
        super().__init__(what, fix=fix)
        self.needed_bytes = needed_bytes
