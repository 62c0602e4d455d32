"""The check at the start: the layers that will train are the model, and its loss is put together right.

A model without weights is filled for the check, in a copy that is dropped afterwards; one that does not fit into half of the
free memory borrows overlapping values from a small buffer instead. Every rank of a job runs the check by itself, before it
talks to the others, and finds the same.
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
from meshwright.train.setup.captured_layers import CutGraph, cut_graph
from meshwright.train.setup.loss_additivity import batch_norms, whole_loss

log = logging.getLogger(__name__)

LARGE, TOO_LARGE = 10**9, 4 * 10**9
"""Above so many parameters one size is compared; above so many none."""


@dataclass(frozen=True)
class Start:
    """What is about to train."""

    model: Any
    """A module with its weights, or a sketch."""
    flat: Flat
    example: Given
    stages: int = 1
    cuts: Sequence[str | int] | None = None
    loss: Loss | None = None
    """A loss function beside the model."""
    count: Count | None = None
    loss_kind: LossKind = LossKind.MEAN
    microbatches: int = 1
    """Into how many parts a batch is cut, on all copies together."""
    more: Given | None = None
    """An example with more rows, for the loss."""
    precision: Precision | None = None
    weights: str | Path | None = None
    graph: CutGraph | None = None
    """Where the graph is cut, if that has been chosen already."""


@dataclass(frozen=True)
class Evaluation:
    """How a model is evaluated: by the layers that train, by another graph, or not at all."""

    graph: Flat | None = None
    refused: MeshwrightError | None = None

    def refuse(self) -> None:
        """Raise if captured layers do not compute the model's evaluation."""
        if self.refused is not None:
            raise MeshwrightError(self.refused.what, fix=self.refused.fix)


def check_start(start: Start) -> Evaluation:
    """Raise if the captured layers do not train as the model does; return how it is evaluated."""
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
    """Compare, and warn about a loss that is put together wrong; None where the check was left out.

    A model that does something else in evaluation is captured once more in that mode; that graph is returned too.
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
        _look_at_loss(start, model, Objective(start.loss, weigh=cut.weigh, count=start.count, kind=start.loss_kind))
    return verdict, _evaluated(start, model, graph, verdict)


def _evaluated(start: Start, model: nn.Module, cut_as: CutGraph, verdict: Verdict) -> Flat | None:
    """The graph of a model in evaluation, where its training graph is wrong there and this one is right."""
    if verdict.evaluation is None or verdict.training is not None or verdict.refused is not None:
        return None
    own_loss = start.loss is not None
    try:
        graph = flatten(model, start.example, own_loss=own_loss, training=False)
        cut = cut_as.with_evaluation(model, graph).open(model).evaluation
    except MeshwrightError as error:
        verdict.notes.append(f"in evaluation the model cannot be captured: {error.what}")
        return None
    assert cut is not None
    found = compare(model, cut.modules, cut.starts, graph, start.example, own_loss=own_loss, modes=(False,))
    verdict.notes += found.notes
    if found.evaluation is not None:
        return None
    verdict.notes.append("evaluation is captured by itself: the model does something else there")
    verdict.runs += found.runs
    verdict.evaluation = None
    return graph


def _look_at_loss(start: Start, model: nn.Module, objective: Objective) -> None:
    """Warn where the loss of a batch is not what its microbatches give."""
    columns = columns_of(model, start.example, own_loss=objective.loss is not None)
    example = start.example if start.more is None else start.more
    found = whole_loss(model, columns, start.flat, example, objective, training=not start.flat.random)
    told = None if found is None else found.warning(objective.kind)
    norms = batch_norms(start.flat)
    if told is not None:
        log.warning("%s%s", told, f" ({norms[0]} norms over the rows of a microbatch)" if norms else "")
    elif norms and start.flat.random:  # the comparison had to run in evaluation, where batch norm does not look at rows
        log.warning("%s norms over the rows of a microbatch: training depends on the number of microbatches", norms[0])


def filled(skeleton: Skeleton, weights: str | Path | None) -> nn.Module:
    """A copy of a sketch's model with values: its own if they fit, else borrowed ones."""
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
                put(parameter, _borrowed(parameter))
    return model


def _borrowed(parameter: Tensor) -> Tensor:
    """Values whose rows overlap in memory: as many as a few rows have, and no two rows are the same."""
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
    """Memory that this process may take: what the host has left, shared by the ranks on it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return found // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
