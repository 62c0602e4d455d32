"""What a plan must respect: how rows are split among the devices of a stage."""

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
    """The rows of a microbatch, None if they are not known, and how they may be split."""

    rows: int | None = None
    split_rows: SplitRows = SplitRows.IGNORE

    def allows(self, width: int) -> bool:
        """Returns whether so many devices may share a stage."""
        if self.rows is None or self.split_rows is SplitRows.IGNORE:
            return True
        return self.rows % width == 0 if self.split_rows is SplitRows.EVEN else width <= self.rows
