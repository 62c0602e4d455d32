"""How a step's rows follow from batch size, accumulation, copies and microbatches.

    a step   = per_device_train_batch_size x gradient_accumulation_steps x dp rows, as in the Hugging Face Trainer
    a copy   = its share of them, cut into `microbatches`

`microbatches` is gradient_accumulation_steps where nothing else is said, or the next multiple of it that fills the
pipeline; given by hand it must be a multiple, so that no accumulation step is torn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.plan import Parallel


@dataclass(frozen=True)
class StepRows:
    """The rows of a step: `device` per microstep and copy, `accumulation` microsteps, `copies`."""

    device: int
    accumulation: int
    copies: int

    @property
    def batch(self) -> int:
        """Rows of one microstep of all copies: what a serial data loader would give."""
        return self.device * self.copies

    @property
    def step(self) -> int:
        """Rows of a whole step."""
        return self.batch * self.accumulation


def plan_for(asked: Mapping[str, Any], *, device: int, accumulation: int) -> Parallel:
    """The plan with its number of microbatches, or why batch sizes and plan contradict each other."""
    for name, count in (("per_device_train_batch_size", device), ("gradient_accumulation_steps", accumulation)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise MeshwrightError(f"{name} must be a whole number of at least 1, got {count!r}", fix=f"{name}=8")
    given = asked.get("microbatches") or 0
    plan = Parallel.of(asked)
    microbatches = plan.microbatches if given else accumulation * ceil(plan.pp / accumulation)
    if given and given % accumulation:
        raise MeshwrightError(
            f"microbatches={given} is no multiple of gradient_accumulation_steps={accumulation}",
            fix=f"gradient_accumulation_steps={given}, or microbatches={accumulation * ceil(given / accumulation)}",
        )
    if device * accumulation < microbatches:
        raise MeshwrightError(
            f"per_device_train_batch_size={device} x gradient_accumulation_steps={accumulation} = {device * accumulation} rows "
            f"cannot be cut into {microbatches} microbatches",
            fix=f"gradient_accumulation_steps={microbatches}"
            if not given
            else f"per_device_train_batch_size={ceil(given / accumulation)}",
        )
    return Parallel.of({**asked, "microbatches": microbatches})
