"""What the loss of some rows is: a mean over what counts in them, or a sum."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from meshwright.errors import MeshwrightError


class LossKind(StrEnum):
    """How the losses of microbatches become that of their batch."""

    MEAN = "mean"  # each counts by its rows or labels; their sum is divided once
    SUM = "sum"  # they are added up

    @classmethod
    def of(cls, given: Any) -> LossKind:
        """A kind by its name."""
        try:
            return cls(given)
        except ValueError:
            raise MeshwrightError(f"a loss is a mean or a sum, got loss_kind={given!r}", fix='loss_kind="sum"') from None
