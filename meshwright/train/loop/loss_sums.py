"""Sums of the losses of a run, for its logs."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, nan

from meshwright.train.session.segment import StepResult


@dataclass
class LossSums:
    """Sums of the losses since the last log, and since the start of the run."""

    since_log: float = 0.0
    total: float = 0.0
    logged_at: int = 0
    counted: int = 0
    nonfinite: int = 0
    nonfinite_total: int = 0
    any_counted: bool = False
    last: StepResult | None = None

    def add(self, result: StepResult, step: int, *, filtered: bool) -> bool:
        """Adds the loss of one step.

        With `filtered`, a loss that is NaN or infinite is replaced by the mean so far, and the method returns False.
        """
        self.nonfinite += not isfinite(result.loss)
        replaced = filtered and not isfinite(result.loss)
        self.since_log += self.since_log / (1 + step - self.logged_at) if replaced else result.loss
        self.counted += not replaced
        self.any_counted = self.any_counted or not replaced
        self.last = result
        return not replaced

    def drain(self, step: int) -> dict[str, float]:
        """Returns the entries of a log and resets the sums. The loss is NaN if the loss of every step was replaced."""
        assert self.last is not None
        logs = {
            "loss": self.since_log / (step - self.logged_at) if self.counted else nan,
            "grad_norm": self.last.grad_norm,
            "learning_rate": self.last.learning_rate,
        }
        logs |= {"nan_losses": self.nonfinite} if self.nonfinite else {}
        self.nonfinite_total += self.nonfinite
        self.total += self.since_log
        self.since_log, self.logged_at, self.counted, self.nonfinite = 0.0, step, 0, 0
        return logs
