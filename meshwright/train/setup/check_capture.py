"""The start check: the captured layers compute the same as the model, and the microbatch losses add up to the model's loss.

If the model has no weights yet, a temporary copy is filled for the check. If that copy does not fit into half of the free
memory, its parameters are overlapping views of a small buffer instead. Every rank of a job runs the check before any
communication, and all ranks get the same result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.check.check_result import Verdict
from meshwright.capture.check.start_check import BUDGET_S, compare
from meshwright.capture.trace.batch_columns import columns_of
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.capture.weights.sketch import Skeleton, tensors_of
from meshwright.capture.weights.swap_tensor import put
from meshwright.errors import MeshwrightError
from meshwright.runtime.stage.batch import Given
from meshwright.runtime.stage.objective import Count, Loss, LossKind, Objective
from meshwright.runtime.stage.precision import Precision
from meshwright.train.loss.loss_additivity import batch_norms, whole_loss
from meshwright.train.setup.captured_layers import CutGraph, cut_graph

log = logging.getLogger(__name__)

LARGE, TOO_LARGE = 10**9, 4 * 10**9
"""Above LARGE parameters only one batch size is compared. Above TOO_LARGE parameters the check is skipped."""


@dataclass(frozen=True)
class Start:
    """The inputs of the start check."""

    model: Any
    """A module with its weights, or a sketch."""
    flat: Flat
    example: Given
    stages: int = 1
    cuts: Sequence[str | int] | None = None
    loss: Loss | None = None
    """The user's loss function, if any."""
    count: Count | None = None
    loss_kind: LossKind = LossKind.MEAN
    microbatches: int = 1
    """The number of microbatches of a batch, over all data-parallel ranks."""
    more: Given | None = None
    """An example with more rows, to check the loss with."""
    precision: Precision | None = None
    weights: str | Path | None = None
    graph: CutGraph | None = None
    """The cuts of the graph, if they are already chosen."""


@dataclass(frozen=True)
class Evaluation:
    """How a model is evaluated: with the training graph, with another graph, or not at all."""

    graph: Flat | None = None
    refused: MeshwrightError | None = None

    def refuse(self) -> None:
        """Raises if the captured layers do not compute what the model computes in evaluation mode."""
        if self.refused is not None:
            raise MeshwrightError(self.refused.what, fix=self.refused.fix)


def check_start(start: Start) -> Evaluation:
    """Raises if the captured layers do not train as the model does. Returns how the model is evaluated."""
    checked = verdict_of(start)
    if checked is None:
        return Evaluation()
    verdict, evaluated = checked
    for note in verdict.notes:
        log.info("start check: %s", note)
    for warning in verdict.warnings:
        log.warning(warning)
    if verdict.refused is not None:
        raise MeshwrightError(verdict.refused.why, fix=verdict.refused.fix)
    if verdict.training is not None:
        raise verdict.training.error()
    log.info("start check: captured layers equal the model, %.1f s: %s", verdict.seconds, "; ".join(verdict.runs))
    return Evaluation(evaluated, None if verdict.evaluation is None else verdict.evaluation.error())


def verdict_of(start: Start) -> tuple[Verdict, Flat | None] | None:
    """Compares the captured layers with the model, and warns if microbatch losses do not add up. Returns None if skipped.

    A model that computes something else in evaluation mode is captured again in that mode. That graph is also returned.
    """
    model = start.model.model if isinstance(start.model, Skeleton) else start.model
    count = sum(p.numel() for p in model.parameters())
    if count > TOO_LARGE:
        log.warning("start check: skipped, the model has %.1f G parameters and the check would take minutes", count / 1e9)
        return None
    if isinstance(start.model, Skeleton):
        model = filled(start.model, start.weights)
    own_loss = start.loss is not None
    graph = start.graph or cut_graph(model, start.example, start.flat, start.stages, at=start.cuts, own_loss=own_loss)
    cut = graph.open(model)
    dtype = start.precision.dtype if start.precision is not None else None
    budget = BUDGET_S if count <= LARGE else 0.0
    verdict = compare(model, cut.modules, cut.starts, start.flat, start.example, own_loss=own_loss, dtype=dtype, budget_s=budget)
    if verdict.refused is None and verdict.training is None and start.microbatches > 1:
        _check_loss(start, model, Objective(start.loss, weigh=cut.weigh, count=start.count, kind=start.loss_kind))
    return verdict, _evaluation_graph(start, model, graph, verdict)


def _evaluation_graph(start: Start, model: nn.Module, training_cuts: CutGraph, verdict: Verdict) -> Flat | None:
    """Returns a graph for evaluation if the training graph is wrong in evaluation mode and the new graph is right."""
    if verdict.evaluation is None or verdict.training is not None or verdict.refused is not None:
        return None
    own_loss = start.loss is not None
    try:
        graph = flatten(model, start.example, own_loss=own_loss, training=False)
        cut = training_cuts.with_evaluation(model, graph).open(model).evaluation
    except MeshwrightError as error:
        verdict.notes.append(f"the model cannot be captured in evaluation mode: {error.what}")
        return None
    assert cut is not None
    found = compare(model, cut.modules, cut.starts, graph, start.example, own_loss=own_loss, modes=(False,))
    verdict.notes += found.notes
    if found.evaluation is not None:
        return None
    verdict.notes.append("evaluation has its own graph: the model computes something else in evaluation mode")
    verdict.runs += found.runs
    verdict.evaluation = None
    return graph


def _check_loss(start: Start, model: nn.Module, objective: Objective) -> None:
    """Warns if the loss of a batch differs from the combined loss of its microbatches."""
    columns = columns_of(model, start.example, own_loss=objective.loss is not None)
    example = start.example if start.more is None else start.more
    found = whole_loss(model, columns, start.flat, example, objective, training=not start.flat.random)
    warning = None if found is None else found.warning(objective.kind)
    norms = batch_norms(start.flat)
    if warning is not None:
        log.warning("%s%s", warning, f" ({norms[0]} normalizes over the rows of a microbatch)" if norms else "")
    elif norms and start.flat.random:  # the comparison ran in evaluation mode, where batch norm does not depend on the rows
        log.warning("%s normalizes over the rows of a microbatch: training depends on the number of microbatches", norms[0])


def filled(skeleton: Skeleton, weights: str | Path | None) -> nn.Module:
    """Returns a copy of a sketch's model with values: the true ones if they fit into memory, else overlapping ones."""
    stand_in = replace(skeleton, model=deepcopy(skeleton.model))
    model: nn.Module = stand_in.model
    every = dict(tensors_of(model))
    size = sum(t.numel() * t.element_size() for t in {id(t): t for t in every.values()}.values())
    if 2 * size <= free_bytes():
        stand_in.give(tuple(every), weights)
    else:
        stand_in.give([name for name, t in every.items() if not isinstance(t, nn.Parameter)], weights)
        for parameter in model.parameters():
            if parameter.is_meta:
                put(parameter, _overlapping(parameter))
    return model


def _overlapping(parameter: Tensor) -> Tensor:
    """Returns random values whose rows overlap in memory. They take the memory of a few rows, and no two rows are equal."""
    strides = [1]
    for _ in range(parameter.dim() - 1):
        strides.insert(0, strides[0] * 4 + 3)
    size = 1 + sum((count - 1) * stride for count, stride in zip(parameter.shape, strides, strict=False))
    drawn = torch.empty(size, dtype=torch.float32)
    generator = torch.Generator().manual_seed(size)
    matrix = parameter.dim() > 1
    values = drawn.normal_(0.0, 0.05, generator=generator) if matrix else drawn.uniform_(0.5, 1.5, generator=generator)
    return values.to(parameter.dtype).as_strided(tuple(parameter.shape), strides[: parameter.dim()])


def free_bytes() -> int:
    """Returns the memory that this process may use: the free memory of the host, divided by the number of its ranks."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return found // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
