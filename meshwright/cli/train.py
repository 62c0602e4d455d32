"""`meshwright train`: trains a model on local workers or under torchrun, from a TOML file or from flags."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli._parts import inputs, outputs, running
from meshwright.cli._parts.flag_groups import with_groups
from meshwright.cli._parts.mode_flags import ModeFlags, flag_of
from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import toml
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_file import asked, is_auto, is_plan_path
from meshwright.ir.plan.plan_order import refers
from meshwright.train.inputs.usable_arguments import refuse_folder
from meshwright.train.setup.settled_plan import settled

if TYPE_CHECKING:
    from meshwright.train.job_file import Job

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Flags of the training arguments are parsed separately, by their own names."""


@with_groups
def train(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|JOB.toml", help=f"{inputs.MODEL_FORMS}; or a whole job."),
    ],
    parallel: inputs.Plan = None,
    *,
    split: inputs.DegreeFlags,
    ranks: inputs.Ranks = None,
    tensor: ModeFlags,
    dataset: Annotated[
        str | None,
        typer.Option(help="stdlib, digits, a text or JSONL file, a Hugging Face data set, or package.module:function."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="last|FOLDER", help="Resume from a checkpoint.")] = None,
    save_model: Annotated[Path | None, typer.Option(help="Write the trained model here.")] = None,
    trace: running.TraceFile = None,
    as_json: inputs.Json = False,
) -> None:
    """Train a model. Every training argument of Hugging Face is a flag: --max-steps 100 --learning-rate 1e-3 ...

    Exit code 0: trained. 2: the job cannot be used. 3: it ran, but the loss is not a finite number.
    """
    gc.enable()  # unlike other verbs, this one runs for a long time
    degrees = {**split.plan_fields(), "ranks": inputs.rank_list(ranks), **tensor.plan_fields()}
    job = asked_job(model, context.args, parallel, degrees, {"dataset": dataset, "length": length, "resume": resume})
    checkpoint = job.checkpoint
    trainer = job.trainer()
    if "logging_nan_inf_filter" not in job.arguments:
        trainer.args.logging_nan_inf_filter = False  # show NaN and infinite losses
    if save_model is not None and trainer.is_world_process_zero():
        refuse_folder("--save-model", save_model)
    running.follow(trainer, trace, as_json=as_json)
    output = trainer.train(resume_from_checkpoint=checkpoint)
    if save_model is not None:
        trainer.save_model(str(save_model))
    if trainer.is_world_process_zero():
        running.report(trainer, output, trace, as_json=as_json)
    if not isfinite(output.training_loss):
        raise typer.Exit(3)


def asked_job(model: str, flags: list[str], parallel: str | None, degrees: Mapping[str, Any], more: Mapping[str, Any]) -> Job:
    """Returns the job from flags: a plan by `--plan` or by degrees, `more` keys of the job, and training argument flags."""
    given, microbatches = {name: value for name, value in degrees.items() if value is not None}, degrees["microbatches"]
    if microbatches is not None and microbatches < 1:
        raise MeshwrightError(f"a step has at least 1 microbatch, got --microbatches {microbatches}", fix="--microbatches 4")
    if parallel is not None and given:
        raise MeshwrightError(f"--plan and --{flag_of(next(iter(given)))} both say how to split", fix="give only one of them")
    if parallel is not None and (is_auto(parallel) or is_plan_path(parallel)):
        return _job(model, flags, {"parallel": parallel, **more})
    plan = asked(parallel) if parallel is not None else given
    if not refers(Parallel.of(plan).schedule):
        settled(Parallel.of(plan))  # the training arguments read or call the user's own schedule, once
    return _job(model, flags, {"parallel": plan, **more})


def _job(model: str, flags: list[str], given: dict[str, Any]) -> Job:
    """Returns a job from a file or from flags. A file is complete, so flags next to it raise."""
    from meshwright.train.job_file import KEYS, Job, flags_to_arguments, read_job

    path = Path(model)
    if path.suffix == ".toml" and os.path.exists(path) and _is_job(outputs.read(path)):
        if extra := [f"--{name}" for name, value in given.items() if value] + flags:
            raise MeshwrightError(f"{model} is a complete job, so {extra[0]} cannot be given", fix=f"write it into {model}")
        return read_job(path)
    assert set(given) <= KEYS
    return Job(model=model, arguments=flags_to_arguments(flags), **given)


def _is_job(text: str) -> bool:
    """True for a job, which names its model; a model file has a config instead."""
    return "config" not in toml(text, "this file")
