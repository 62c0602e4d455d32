"""Computes the rows of a step from batch size, accumulation, data-parallel copies and microbatches.

    a step   = per_device_train_batch_size x gradient_accumulation_steps x dp rows, as in the Hugging Face Trainer
    a copy   = its share of them, cut into `microbatches`

By default `microbatches` is gradient_accumulation_steps, or the next multiple of it that fills the pipeline. A value from the
user must be a multiple of gradient_accumulation_steps, so that no microbatch mixes rows of two accumulation steps.
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
    """The rows of a step: `device` rows per accumulation step and copy, `accumulation` steps, `copies` data-parallel copies."""

    device: int
    accumulation: int
    copies: int

    @property
    def batch(self) -> int:
        """Rows of one accumulation step of all copies: the batch of a serial data loader."""
        return self.device * self.copies

    @property
    def step(self) -> int:
        """Rows of a whole step."""
        return self.batch * self.accumulation


def plan_for(asked: Mapping[str, Any], *, device: int, accumulation: int) -> Parallel:
    """Return the plan with its number of microbatches. Raises if batch sizes and plan contradict each other."""
    for name, count in (("per_device_train_batch_size", device), ("gradient_accumulation_steps", accumulation)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < LARGEST:
            raise MeshwrightError(
                f"{name} must be a whole number of at least 1 and below {LARGEST}, got {count!r}", fix=f"{name}=8"
            )
    plan = Parallel.of(asked)
    if plan.mode.is_cyclic:
        return _one_microbatch_each(plan, device, accumulation)
    given = asked.get("microbatches") or (plan.microbatches if plan.order is not None else 0)
    microbatches = plan.microbatches if given else accumulation * ceil(plan.pp / accumulation)
    if given and given % accumulation:
        raise MeshwrightError(
            f"microbatches={given} is not a multiple of gradient_accumulation_steps={accumulation}",
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


def _one_microbatch_each(plan: Parallel, device: int, accumulation: int) -> Parallel:
    """Return a cyclic plan, whose copies run one microbatch per step."""
    if accumulation > 1:
        raise MeshwrightError(
            f'dp_mode="{plan.mode}" runs one microbatch per copy and step, got gradient_accumulation_steps={accumulation}',
            fix=f"gradient_accumulation_steps=1, per_device_train_batch_size={device * accumulation}",
        )
    return plan


def microbatch_sizes(steps: Iterable[int], *, copies: int, microbatches: int) -> set[int]:
    """Returns the numbers of rows that microbatches have in steps of so many rows. Microbatches without rows are left out."""
    shares = {Rows(0, rows).cut(copy, copies).size for rows in steps for copy in range(copies)}
    return {Rows(0, share).cut(number, microbatches).size for share in shares for number in range(microbatches)} - {0}


def refuse_small_cuts(refusal: Callable[[Shapes], str | None], example: Given, rows: Iterable[int], cuts: int) -> None:
    """Raise before the first step if some step has microbatches of a size that the captured layers cannot compute."""
    if not isinstance(example, Mapping):
        return
    for step in rows:
        for size in {Rows(0, step).cut(index, cuts).size for index in range(cuts)} - {0}:
            if why := refusal({name: (size, *t.shape[1:]) for name, t in example.items()}):
                raise MeshwrightError(
                    f"a step of {step} rows has microbatches of {size}, and the model was captured for batches with {why}",
                    fix="use fewer microbatches, or dataloader_drop_last=True if it is the last step",
                )
