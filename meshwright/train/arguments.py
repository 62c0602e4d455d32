"""`TrainingArguments`: the arguments of Hugging Face, and two more: `parallel` and `loss_kind`.

This file uses no device and no process group. Arguments that Meshwright does not support are not ignored: the constructor
raises and names them.
"""

from __future__ import annotations

import logging
import os
import typing
from dataclasses import dataclass, field
from functools import cache
from math import inf, isfinite
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers.training_args import ParallelMode

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_file import asked, auto_cluster, is_auto, is_plan_path, plan_table
from meshwright.ir.plan.plan_order import refers
from meshwright.ir.plan.planned_file import PlannedFile, planned_file
from meshwright.ir.reader import LARGEST
from meshwright.runtime.stage.objective import LossKind
from meshwright.runtime.stage.precision import Precision
from meshwright.train.data.step_rows import StepRows, plan_for
from meshwright.train.inputs.usable_arguments import refuse_kinds, usable
from meshwright.train.setup.settled_plan import settled

_log = logging.getLogger(__name__)

_REFUSED: dict[str, tuple[Any, str]] = {
    "torch_compile": (False, "leave it out: stages run without torch.compile"),
    "deepspeed": (None, "parallel=dict(pp=..., dp=...)"),
    "fsdp": (None, "parallel=dict(pp=..., dp=...)"),
    "use_liger_kernel": (False, "leave it out: the model runs with its own kernels"),
    "neftune_noise_alpha": (None, "add the noise in the model"),
    "auto_find_batch_size": (False, "set per_device_train_batch_size"),
    "push_to_hub": (False, "trainer.save_model(), then upload"),
    "full_determinism": (False, "one thread per worker is deterministic already"),
    "batch_eval_metrics": (False, "compute_metrics gets all predictions at once"),
    "enable_jit_checkpoint": (False, "save_steps"),
    "torch_empty_cache_steps": (None, "leave it out"),
    "include_num_input_tokens_seen": ("no", "count them in a callback"),
    "bf16_full_eval": (False, "bf16=True, for both training and evaluation"),
    "fp16_full_eval": (False, "fp16=True, for both training and evaluation"),
    "label_smoothing_factor": (0.0, "compute_loss_func with torch.nn.CrossEntropyLoss(label_smoothing=...)"),
}
"""Arguments that are not supported: the value that turns them off, and what to do instead."""

_LEAST: dict[str, float] = {
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "num_train_epochs"), 0),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "eval_delay"), 0),
}
"""Arguments that must be finite numbers, and their smallest values."""

_WHOLE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),
    "per_device_eval_batch_size": (1, LARGEST),
    "max_steps": (-1, LARGEST),
    "dataloader_num_workers": (0, LARGEST),
    "save_total_limit": (1, LARGEST),
}
"""Arguments that must be whole numbers, and their smallest and largest values. The largest seed is that of numpy."""

_OPTIONAL = frozenset({"data_seed", "save_total_limit", "eval_steps", "eval_delay", "max_grad_norm"})
"""Numeric arguments that may be None."""


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """The training arguments of Hugging Face, and two more.

    All arguments of `transformers.TrainingArguments` have their usual names and meanings. Those that Meshwright does not
    support are refused when the object is made.

    Args:
        parallel: The plan: a mapping such as `dict(pp=4, schedule="chimera")`, a `Parallel`, or a plan file. None trains in
            one process. `auto` measures the machine and the model and chooses a plan; `auto:CLUSTER` takes a cluster file or
            preset. The batch of a step is then per_device_train_batch_size x gradient_accumulation_steps x devices.
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
        given = self.parallel
        self.auto = self.parallel if is_auto(self.parallel) else None
        self.planned = cast(PlannedFile | None, None)  # of `auto` once it is chosen, or the plan file that was given
        if self.auto is not None:
            auto_cluster(str(self.auto))  # raises if it names none
        if self.auto is None:
            self.parallel = self._asked()
        self.loss_kind = LossKind.of(self.loss_kind).value
        if not torch.cuda.is_available():
            self.use_cpu = True
        self._refuse_numbers()
        self._refuse_unsupported()
        refuse_kinds({name: value for name, value in vars(self).items() if name not in _REFUSED}, _declared())
        with usable("these training arguments"):
            super().__post_init__()
        self._refuse_unsupported()  # again, because some arguments set others
        self._refuse()
        settled(self.plan)  # raises here, before anything starts, if the plan has contradictions
        if is_plan_path(given):
            self.planned = planned_file(cast(str | Path, given))
        self._note_other_inputs(given)

    @property
    def plan(self) -> Parallel:
        """The plan, with its number of microbatches."""
        wanted = self._fields
        if self.gradient_checkpointing and wanted.get("recompute") is None:
            wanted["recompute"] = "inline"
        return plan_for(wanted, device=self.per_device_train_batch_size, accumulation=self.gradient_accumulation_steps)

    def take_plan(self, planned: PlannedFile, batch: int) -> None:
        """Sets the plan that `auto` has chosen for a batch of this many rows, which its data-parallel copies share equally."""
        copies = planned.parallel.dp
        if batch % copies:
            raise MeshwrightError(f"{batch} rows of a step cannot be shared equally by {copies} data-parallel copies")
        self.planned, self.parallel = planned, planned.parallel.given()
        self.gradient_accumulation_steps, self.per_device_train_batch_size = 1, batch // copies
        settled(self.plan)

    @property
    def rows(self) -> StepRows:
        """The rows of a step."""
        return StepRows(self.per_device_train_batch_size, self.gradient_accumulation_steps, self.plan.dp)

    @property
    def example_rows(self) -> int:
        """The number of rows of the example that a model is captured with: one microbatch, but at least two rows.

        With one row the capture could treat the number of rows as a constant.
        """
        return max(2, self.rows.step // (self.plan.microbatches * self.plan.copies))

    @property
    def precision(self) -> Precision:
        """The format that layers compute in. Weights keep their format."""
        return Precision(compute="bf16" if self.bf16 else "fp16" if self.fp16 else "fp32")

    @property
    def device(self) -> torch.device:
        """The type of device that a process computes on. The ranks set up their own devices."""
        return torch.device("cpu" if self.use_cpu else "cuda")

    @property
    def n_gpu(self) -> int:
        """The number of GPUs per process: 0 or 1."""
        return 0 if self.use_cpu else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether training runs in one process or in several."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """The total number of processes."""
        return self.plan.processes

    @property
    def process_index(self) -> int:
        """The rank of this process among those of the plan; a larger number on idle ranks, so that only one has 0."""
        if torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        rank = int(os.environ.get("RANK", 0))
        members = sorted(self._fields.get("ranks") or ())
        if not members or "RANK" not in os.environ:
            return rank
        return members.index(rank) if rank in members else len(members) + rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its host."""
        return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else self.process_index

    def to_dict(self) -> dict[str, Any]:
        """Returns all arguments as values that JSON has, for trackers and logs."""
        table = self.parallel if isinstance(self.parallel, str) else plan_table(self._fields)
        return {**super().to_dict(), "parallel": table}

    @property
    def _fields(self) -> dict[str, Any]:
        """The fields of the plan as given. `auto` has none until its plan is chosen."""
        return {} if isinstance(self.parallel, str) else dict(self.parallel or {})

    def _asked(self) -> dict[str, Any]:
        """Returns the fields of `parallel`. A user's schedule is read, or built for the number of microbatches of a step."""
        found = asked(self.parallel)
        plan, steps = Parallel.of(found), self.gradient_accumulation_steps
        if plan.order is not None:
            return plan.given()
        if not refers(plan.schedule):
            return found
        return settled(plan, accumulation=steps if isinstance(steps, int) and 0 < steps < LARGEST else 1).given()

    def _note_other_inputs(self, given: Any) -> None:
        """Warns if a plan file was edited, or made for another batch or precision: it runs, but its prediction does not hold."""
        if self.planned is None or self.process_index:
            return
        now = {"batch": self.rows.step, "precision": self.precision.compute}
        for change in self.planned.changes(now):
            _log.warning("the plan %s was made for other inputs, so its prediction does not hold: %s", given, change)

    def _refuse_numbers(self) -> None:
        """Raises if a numeric argument is not a number or is out of range."""
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
    """Returns the declared types of all arguments."""
    return typing.get_type_hints(TrainingArguments)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
