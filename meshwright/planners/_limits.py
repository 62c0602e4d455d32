"""What a plan must respect: how rows are split among the devices of a stage, memory, and what a user asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SplitRows(StrEnum):
    """May the devices that share a stage get unequal numbers of rows?"""

    EVEN = "even"  # the number of devices divides the rows of a microbatch
    UNEVEN = "uneven"  # there are at least as many rows as devices
    IGNORE = "ignore"  # rows are not looked at


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The rows of a microbatch, None if they are not known, how they may be split, and what a plan has to be.

    `schedule`, `pp` and `dp` fix a choice; `seconds` ends a search early. `explain` asks for rivals and flip points.
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

    def allows(self, width: int) -> bool:
        """Returns whether so many devices may share a stage."""
        if self.rows is None or self.split_rows is SplitRows.IGNORE:
            return True
        return self.rows % width == 0 if self.split_rows is SplitRows.EVEN else width <= self.rows
