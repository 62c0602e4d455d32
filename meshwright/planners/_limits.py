"""What a plan must respect: how rows are split among the devices of a stage, memory, and what a user asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.profile import Profile

Refusal = Callable[[Mapping[str, Any], int | None], str | None]
"""Called with the keywords of a plan and the rows of its microbatches: why it cannot run, or None."""

MOST_MICROBATCHES = 16_384
"""Every action of a step is simulated: with more microbatches a search would take minutes."""
MOST_ROWS = 128
"""Microbatches of more rows are not recommended: devices are busy with fewer."""


class SplitRows(StrEnum):
    """May the devices that share a stage get unequal numbers of rows?"""

    EVEN = "even"  # the number of devices divides the rows of a microbatch
    UNEVEN = "uneven"  # there are at least as many rows as devices
    IGNORE = "ignore"  # rows are not looked at


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The rows of a microbatch, None if they are not known, how they may be split, and what a plan has to be.

    `schedule`, `pp` and `dp` fix a choice; `tensor` and `zero` allow ranks with parts of tensors; `seconds` ends a search early.
    `refusal` says why a plan cannot run the model.
    A search calls `progress` with the share of its work that is done, and with what it has found in words.
    """

    rows: int | None = None
    split_rows: SplitRows = SplitRows.IGNORE
    memory_free: bool = False
    schedule: str | None = None
    pp: int | None = None
    dp: int | None = None
    tensor: bool = True
    zero: bool = True
    seconds: float = float("inf")
    refusal: Refusal | None = None
    progress: Callable[[float, str], None] | None = None

    def allows(self, width: int, rows: int | None) -> bool:
        """Returns whether `width` devices may share a stage whose microbatches have this number of rows."""
        if rows is None or self.split_rows is SplitRows.IGNORE:
            return True
        return rows % width == 0 if self.split_rows is SplitRows.EVEN else width <= rows


@dataclass(frozen=True)
class Asked:
    """A complete request to a planner."""

    profile: Profile
    cluster: Cluster
    microbatches: int | None
    batch: int | None
    limits: PlanLimits


class NothingFitsError(MeshwrightError):
    """No plan fits into the memory of the devices.

    A plan would fit if every device had at least `needed_bytes`. `changes` are all changes that help.
    """

    def __init__(self, what: str, *, fix: str, needed_bytes: float, changes: tuple[dict[str, Any], ...] = ()) -> None:
        super().__init__(what, fix=fix)
        self.needed_bytes, self.changes = needed_bytes, changes
