"""How a step's rows follow from batch size, accumulation, copies and microbatches.

    a step   = per_device_train_batch_size x gradient_accumulation_steps x dp rows, as in the Hugging Face Trainer
    a copy   = its share of them, cut into `microbatches`

`microbatches` is gradient_accumulation_steps where nothing else is said, or the next multiple of it that fills the
pipeline; given by hand it must be a multiple, so that no accumulation step is torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Rows
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.reader import LARGEST
from meshwright.runtime.stage.batch import Given
from meshwright.runtime.stage.layers import Shapes


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
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < LARGEST:
            raise MeshwrightError(
                f"{name} must be a whole number of at least 1 and below {LARGEST}, got {count!r}", fix=f"{name}=8"
            )
    plan = Parallel.of(asked)
    given = asked.get("microbatches") or (plan.microbatches if plan.order is not None else 0)
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


def refuse_small_cuts(refusal: Callable[[Shapes], str | None], example: Given, rows: Iterable[int], cuts: int) -> None:
    """Refuse, before the first step, numbers of rows that some step has and that captured layers are not right for."""
    if not isinstance(example, Mapping):
        return
    for step in rows:
        for size in {Rows(0, step).cut(index, cuts).size for index in range(cuts)} - {0}:
            if why := refusal({name: (size, *t.shape[1:]) for name, t in example.items()}):
                raise MeshwrightError(
                    f"a step of {step} rows has microbatches of {size}, and the model was captured for batches with {why}",
                    fix="fewer microbatches, or dataloader_drop_last=True where it is the last step",
                )
