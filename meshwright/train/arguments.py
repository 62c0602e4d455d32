"""`TrainingArguments`: those of Hugging Face, by name and habit, and one more: `parallel`.

Nothing here touches a device or a process group; that is done where training runs. What Meshwright does not do is refused
by name when arguments are made, not ignored.
"""

from __future__ import annotations

import os
import typing
from dataclasses import dataclass, field
from functools import cache
from math import inf, isfinite
from typing import Any

import torch
import transformers
from transformers.training_args import ParallelMode

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_file import asked, plan_table
from meshwright.ir.plan.plan_order import refers
from meshwright.ir.reader import LARGEST
from meshwright.runtime.stage.objective import LossKind
from meshwright.runtime.stage.precision import Precision
from meshwright.train.data.step_rows import StepRows, plan_for
from meshwright.train.setup.settled_plan import settled
from meshwright.train.setup.usable_arguments import refuse_kinds, usable

_REFUSED: dict[str, tuple[Any, str]] = {
    "torch_compile": (False, "stages run as they are"),
    "deepspeed": (None, "parallel= says how to split"),
    "fsdp": (None, "parallel=dict(pp=..., dp=...)"),
    "use_liger_kernel": (False, "the model runs as it is"),
    "neftune_noise_alpha": (None, "add the noise in the model"),
    "auto_find_batch_size": (False, "set per_device_train_batch_size"),
    "push_to_hub": (False, "trainer.save_model(), then upload"),
    "full_determinism": (False, "one thread per worker is deterministic already"),
    "batch_eval_metrics": (False, "compute_metrics gets all predictions at once"),
    "enable_jit_checkpoint": (False, "save_steps"),
    "torch_empty_cache_steps": (None, "leave it out"),
    "include_num_input_tokens_seen": ("no", "count them in a callback"),
    "bf16_full_eval": (False, "bf16=True, for training and evaluation alike"),
    "fp16_full_eval": (False, "fp16=True, for training and evaluation alike"),
    "label_smoothing_factor": (0.0, "compute_loss_func with torch.nn.CrossEntropyLoss(label_smoothing=...)"),
}
"""Arguments that are not supported: what they are when off, and what to do instead."""

_LEAST: dict[str, float] = {
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "num_train_epochs"), 0),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "eval_delay"), 0),
}
"""Numbers that are finite and at least so much."""

_WHOLE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),
    "per_device_eval_batch_size": (1, LARGEST),
    "max_steps": (-1, LARGEST),
    "dataloader_num_workers": (0, LARGEST),
    "save_total_limit": (1, LARGEST),
}
"""Whole numbers from a least to a largest one; the largest seed is the largest that numpy takes."""

_OPTIONAL = frozenset({"data_seed", "save_total_limit", "eval_steps", "eval_delay", "max_grad_norm"})
"""Numbers that may be None."""


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """The training arguments of Hugging Face, and two more.

    All arguments of `transformers.TrainingArguments` have their usual names and meanings. Those that Meshwright does not
    support are refused when the object is made.

    Args:
        parallel: The plan: a mapping such as `dict(pp=4, schedule="chimera")`, a `Parallel`, or a plan file. None trains in
            one process.
        loss_kind: `mean` if the model's loss is a mean over rows or labels, `sum` if it is a sum.

    Raises:
        MeshwrightError: A value is not possible, or an argument is not supported; `fix` says what to use instead.

    Examples:
        >>> from meshwright import TrainingArguments
        >>> args = TrainingArguments(output_dir="out", max_steps=100, parallel=dict(pp=4, schedule="chimera", microbatches=8))
        >>> args.plan.processes, args.plan.microbatches
        (4, 8)
    """

    parallel: dict | str | None = field(  # type: ignore[type-arg]  # as HfArgumentParser reads it
        default=None, metadata={"help": "A plan: a JSON or TOML file, or JSON text such as '{\"pp\": 4}'."}
    )

    loss_kind: str = field(
        default="mean", metadata={"help": "What the model's loss is: a mean over rows or labels, or a sum of them."}
    )

    def __post_init__(self) -> None:
        self.parallel = self._asked()
        self.loss_kind = LossKind.of(self.loss_kind).value
        if not torch.cuda.is_available():
            self.use_cpu = True
        self._refuse_numbers()
        self._refuse_unsupported()
        refuse_kinds({name: value for name, value in vars(self).items() if name not in _REFUSED}, _declared())
        with usable("these training arguments"):
            super().__post_init__()
        self._refuse_unsupported()  # some are set by others
        self._refuse()
        settled(self.plan)  # contradictions are said here, before anything starts

    @property
    def plan(self) -> Parallel:
        """How training runs, with its number of microbatches."""
        wanted: dict[str, Any] = dict(self.parallel or {})  # type: ignore[arg-type]
        if self.gradient_checkpointing and wanted.get("recompute") is None:
            wanted["recompute"] = "inline"
        return plan_for(wanted, device=self.per_device_train_batch_size, accumulation=self.gradient_accumulation_steps)

    @property
    def rows(self) -> StepRows:
        """The rows of a step."""
        return StepRows(self.per_device_train_batch_size, self.gradient_accumulation_steps, self.plan.dp)

    @property
    def example_rows(self) -> int:
        """Rows of the example that a model is captured with: a microbatch, with enough rows that none is taken for a constant."""
        return max(2, self.rows.device * self.rows.accumulation // self.plan.microbatches)

    @property
    def precision(self) -> Precision:
        """What layers compute in; weights stay as they are."""
        return Precision(compute="bf16" if self.bf16 else "fp16" if self.fp16 else "fp32")

    @property
    def device(self) -> torch.device:
        """Where a process of this host computes; set up where training runs."""
        return torch.device("cpu" if self.use_cpu else "cuda")

    @property
    def n_gpu(self) -> int:
        """Devices per process: one at most."""
        return 0 if self.use_cpu else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """One process, or several."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.plan.processes

    @property
    def process_index(self) -> int:
        """This process among all."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", 0))

    @property
    def local_process_index(self) -> int:
        """This process among those of its host."""
        return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else self.process_index

    def to_dict(self) -> dict[str, Any]:
        """All arguments as JSON has them, as trackers and logs want them."""
        return {**super().to_dict(), "parallel": plan_table(self.parallel or {})}  # type: ignore[arg-type]

    def _asked(self) -> dict[str, Any]:
        """What `parallel` asks for, with an own schedule read, or built for as many microbatches as there will be."""
        found = asked(self.parallel)
        plan, steps = Parallel.of(found), self.gradient_accumulation_steps
        if plan.order is not None:
            return plan.given()
        if not refers(plan.schedule):
            return found
        return settled(plan, accumulation=steps if isinstance(steps, int) and 0 < steps < LARGEST else 1).given()

    def _refuse_numbers(self) -> None:
        """Numbers that no training could use: no numbers, negative ones, seeds that no generator takes."""
        for name, least in {**_LEAST, "adam_beta1": 0, "adam_beta2": 0}.items():
            value, below = getattr(self, name), 1.0 if name.startswith("adam_beta") else inf
            if not self._none(name) and not (_is_number(value) and least <= value < below):
                top = f" and below {below:g}" if below < inf else ""
                raise MeshwrightError(f"{name} must be a number of at least {least}{top}, got {value!r}", fix=f"{name}=...")
        for name, (least, most) in _WHOLE.items():
            value = getattr(self, name)
            if not self._none(name) and not (_is_number(value) and value == int(value) and least <= value <= most):
                raise MeshwrightError(
                    f"{name} must be a whole number from {least} to {most}, got {value!r}", fix=f"{name}={max(least, 1)}"
                )

    def _none(self, name: str) -> bool:
        return name in _OPTIONAL and getattr(self, name) is None

    def _refuse_unsupported(self) -> None:
        for name, (off, instead) in _REFUSED.items():
            if (found := getattr(self, name)) != off and found:
                raise MeshwrightError(f"{name}={found!r} is not supported", fix=instead)

    def _refuse(self) -> None:
        degrees = self.parallelism_config
        if degrees is not None:
            axes = {name: n for name in ("cp_size", "sp_size", "tp_size") if (n := getattr(degrees, name, 1)) not in (None, 1)}
            what = ", ".join(f"{name}={n}" for name, n in axes.items()) or "parallelism_config"
            name = "context parallelism" if "cp_size" in axes else "accelerate's parallelism"
            raise MeshwrightError(f"{name} ({what}) is not supported", fix="parallel=dict(pp=..., dp=...)")
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise MeshwrightError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} is not supported", fix="random or sequential"
            )


@cache
def _declared() -> dict[str, Any]:
    """The types of all arguments, as their fields declare them."""
    return typing.get_type_hints(TrainingArguments)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
