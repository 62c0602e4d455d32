"""The result of a check: where captured layers differ from the model, and what was run."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from meshwright.capture.check.likely_reasons import Reason
from meshwright.capture.check.paired_runs import Distance
from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class Difference:
    """Where captured layers differ from the model."""

    distance: Distance
    example: str
    training: bool
    layer: str
    reason: Reason

    def error(self) -> MeshwrightError:
        """Return the error that users see."""
        mode = "training" if self.training else "evaluation"
        first = f"; the first layer that differs: {self.layer}" if self.layer else ""
        how = f"{self.distance.what} differs by {self.distance.error:.1e}" if self.distance.error < inf else self.distance.what
        where = f"{how} in {mode} at {self.example}{first}"
        return MeshwrightError(
            f"the captured layers differ from the model: {where}\n  likely reason: {self.reason.why}", fix=self.reason.fix
        )


@dataclass
class Verdict:
    """What a check found, and what it ran: one line for each size and mode."""

    training: Difference | None = None
    evaluation: Difference | None = None
    refused: Reason | None = None
    """Why the model cannot be captured at all, independent of the numbers."""
    draws_in_evaluation: bool = False
    largest: float = 0.0
    runs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
