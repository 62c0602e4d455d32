"""Prepares the run of a Trainer: converts its arguments to a `RunRequest`, and refuses data that it cannot train on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.capture.trace.graph import Flat
from meshwright.capture.trace.packed_sequences import flattened_note
from meshwright.capture.weights.sketch import Skeleton
from meshwright.runtime.stage.batch import Given
from meshwright.runtime.stage.objective import LossKind
from meshwright.train.arguments import TrainingArguments
from meshwright.train.checkpoint import folder_lock
from meshwright.train.data.batches import Source
from meshwright.train.data.step_rows import refuse_small_cuts
from meshwright.train.inputs.usable_arguments import refuse_folder
from meshwright.train.loop.rank_job import output_folder
from meshwright.train.loop.report_to import refuse_reporters
from meshwright.train.loss.loss_additivity import ROWS
from meshwright.train.loss.loss_functions import OwnLoss, count_for, label_count, output_name
from meshwright.train.optimizer.make_optimizer import rates_for
from meshwright.train.optimizer.used_optimizer import refuse_used
from meshwright.train.prepared import Phase, PreparedRun, RunRequest, captured, prepare
from meshwright.train.setup.build_schedule import stages_to_train
from meshwright.train.setup.captured_layers import refuse_lossless
from meshwright.train.setup.where import launched

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerInputs:
    """The arguments of a Trainer that decide how its model runs."""

    args: TrainingArguments
    model: Any
    """A module, a list of layers, or a sketch."""
    weights: Path | None
    compute_loss_func: Callable[..., Any] | None
    check_capture: bool


def prepare_for_trainer(
    inputs: TrainerInputs, source: Source, example: Given, *, trains: bool, phase: Phase | None = None
) -> PreparedRun:
    """Prepares a run for data like this example, which is one microbatch."""
    args, own = inputs.args, inputs.compute_loss_func
    model = inputs.model.model if isinstance(inputs.model, Skeleton) else inputs.model
    count = count_for(model, own_loss=own is not None)
    request = RunRequest(
        inputs.model,
        example,
        args.plan,
        loss=None if own is None else OwnLoss(own, None, count or label_count),
        count=count,
        loss_kind=LossKind.of(args.loss_kind),
        precision=args.precision,
        weights=inputs.weights,
        one_microbatch=True,
        step_rows=tuple(sorted({args.rows.step, _last_rows(args, source) if trains else 0} - {0})),
        check_capture=inputs.check_capture,
        stages=stages_to_train(args.plan),
    )
    flat = captured(request, phase=phase)
    if trains:
        refuse_rows(args, flat, source, example, own_loss=own is not None)
    if isinstance(request.loss, OwnLoss) and flat is not None:
        request = replace(request, loss=replace(request.loss, name=output_name(flat)))
    if flat is not None and inputs.check_capture:
        request = replace(request, more_rows=source.example(max(args.example_rows, ROWS)))
    return prepare(request, flat, phase=phase)


def refuse_rows(args: TrainingArguments, flat: Flat | None, source: Source, example: Given, *, own_loss: bool) -> None:
    """Refuses data that the model cannot train on, and warns if samples are packed into one row."""
    plan, rows = args.plan, args.rows
    if flat is not None:
        refuse_lossless(flat, example, own_loss=own_loss)
        refuse_small_cuts(flat.refusal, example, {rows.step, _last_rows(args, source)} - {0}, plan.microbatches * plan.copies)
    if isinstance(example, Mapping):
        samples = rows.device * rows.accumulation
        cuts = plan.microbatches * plan.copies // plan.dp
        if note := flattened_note(example, min(samples, source.size or samples), cuts):
            log.warning(note)


def _last_rows(args: TrainingArguments, source: Source) -> int:
    """Returns the rows of the last step of an epoch if it is short, else 0."""
    return (source.size or 0) % args.rows.step if not args.dataloader_drop_last else 0


def refuse_unusable(args: TrainingArguments, model: nn.Module, optimizers: tuple[Any, Any], chosen: Any) -> None:
    """Raises if the output folder, the reporters or the optimizer cannot be created, before any capture or worker starts."""
    folder = output_folder(args)
    if args.process_index == 0:
        refuse_folder("output_dir", folder)
        if not launched():  # under torchrun all ranks check this together, after they have connected
            folder_lock.refuse_held(folder)
    refuse_reporters(args.report_to)
    if optimizers[0] is None:
        rates_for(model, args, optimizers, chosen, steps=max(1, args.max_steps))
    elif isinstance(optimizers[0], torch.optim.Optimizer):
        refuse_used(optimizers[0])
