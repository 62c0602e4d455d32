"""Whether the prediction of a plan file is for this run: compares `made_for` of the file with the inputs of the run.

Inputs that only one side knows are not compared, so files without them stay valid. The cluster is not compared: a run does not
measure its links.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.model_graph import line_of, parameter_bytes
from meshwright.capture.trace.graph import Flat, NodeKind
from meshwright.ir.input_limits import shown
from meshwright.ir.links.machines import same_kind
from meshwright.ir.plan.planned_file import model_input
from meshwright.train.arguments import TrainingArguments
from meshwright.train.profiling.profile_request import device_name

_log = logging.getLogger(__name__)

SAID_BEFORE = ("batch", "precision", "parallel")
"""Inputs that the training arguments compare when they are made."""


def other_inputs(args: TrainingArguments, model: nn.Module, flat: Flat | None) -> tuple[str, ...]:
    """Returns the inputs of a run that differ from those that its plan was made for, in words; none without a plan file.

    `flat` is the captured graph; None for a list of layers, whose length and layers are then not compared.
    """
    if args.planned is None:
        return ()
    made_for = dict(args.planned.made_for or {})
    now: dict[str, Any] = {"batch": args.rows.step, "precision": args.precision.compute}
    if flat is not None and (length := _length(flat)) is not None:
        now["length"] = length
    if flat is not None and "model" in made_for:
        line = line_of(model, flat)
        now["model"] = model_input(parameter_bytes(model, line, LayerChain(line).starts))
    found = args.planned.changes(now)
    crowd = _crowd(args, args.planned.parallel.processes)
    return (*found, *_other_recompute(args), *_other_device(args, args.planned.device), *crowd)


def note_other_inputs(changes: tuple[str, ...]) -> None:
    """Warns of differences that were not known when the training arguments were made."""
    for change in changes:
        if not change.startswith(SAID_BEFORE):
            _log.warning("the plan was made for other inputs, so its prediction does not hold: %s", change)


def _length(flat: Flat) -> int | None:
    """Returns the tokens of a row, as a profile counts them; None if no column has tokens."""
    sizes = [node.size for node in flat.nodes if node.kind is NodeKind.COLUMN and node.size is not None]
    tokens = [size.shape[1] for size in sizes if len(size.shape) == 2 and not getattr(torch, size.dtype).is_floating_point]
    return tokens[0] if tokens else None


def _other_recompute(args: TrainingArguments) -> tuple[str, ...]:
    """The recompute of a run, if gradient_checkpointing adds it to a plan that has none."""
    assert args.planned is not None
    said, now = args.planned.parallel.recompute, args.plan.recompute
    return () if now == said else (f"recompute was {said or 'none'}, is {now} by gradient_checkpointing",)


def _crowd(args: TrainingArguments, processes: int) -> tuple[str, ...]:
    """The ranks of this host and its cores, if there are more ranks: then each is slower than its device in a plan."""
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", processes)), len(os.sched_getaffinity(0))
    if args.n_gpu or ranks <= cores:
        return ()
    return (f"each worker had a core of its own, {ranks} workers share {cores} cores",)


def _other_device(args: TrainingArguments, said: str) -> tuple[str, ...]:
    here = device_name(args.device).replace(" ", "-" if args.n_gpu else " ")
    if not said or same_kind(said, here):
        return ()
    return (f"device was {shown(said)}, is {shown(here)}",)
