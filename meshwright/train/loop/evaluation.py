"""Evaluation on one rank: the loss as the Hugging Face Trainer computes it, predictions, and metrics on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from torch import Tensor
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalPrediction, PredictionOutput, denumpify_detensorize, speed_metrics
from transformers.utils.generic import find_labels

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.runtime.engine.evaluate import Outputs
from meshwright.runtime.stage.batch import Given, Own
from meshwright.train.data.batches import Position, Source, numbered_steps, streamed_steps
from meshwright.train.data.sampler import Sampler
from meshwright.train.data.step_rows import StepRows
from meshwright.train.loop.rank_job import RankJob
from meshwright.train.session.session import Session


def predict_on(job: RankJob, session: Session, dataset: Any, prefix: str, *, loss_only: bool) -> PredictionOutput:
    """Returns the predictions and metrics of a data set, equal on every rank. A collective call: all ranks must call it."""
    begun, args = time.time(), job.args
    totals = _EvaluationTotals(job, loss_only)
    for batch in _batches(job, session, dataset, whole=not loss_only):
        tensors = batch.tensors
        labels = _labels(tensors, job)
        outputs = Outputs.NOBODY if loss_only else Outputs.EVERYBODY
        given = batch if loss_only else tensors
        result = session.forward(given, outputs=outputs, loss=labels is not None)
        rows = _rows(tensors) if not loss_only else session.rows(tensors)
        totals.add(result.loss if labels is not None else None, rows, result.outputs, labels, tensors)
    if not totals.rows:
        raise MeshwrightError("the data set is empty: there is nothing to evaluate")
    return totals.finish(prefix, begun, args)


class _EvaluationTotals:
    """The sums and predictions of all batches so far."""

    def __init__(self, job: RankJob, loss_only: bool) -> None:
        self.job, self.loss_only = job, loss_only
        self.total, self.counted, self.rows = 0.0, 0, 0
        concat = job.args.eval_do_concat_batches
        self.predictions, self.labels, self.inputs = (EvalLoopContainer(concat, padding_index=-100) for _ in range(3))

    def add(self, loss: float | None, rows: int, outputs: tuple[Tensor, ...], labels: Any, tensors: Given) -> None:
        """Adds one batch. Its mean loss is weighted by its number of rows."""
        self.rows += rows
        if loss is not None:
            self.total, self.counted = self.total + loss * rows, self.counted + rows
        if self.loss_only:
            return
        logits: Any = outputs[0] if len(outputs) == 1 else outputs
        if self.job.preprocess_logits_for_metrics is not None:
            logits = self.job.preprocess_logits_for_metrics(logits, labels)
        self.predictions.add(logits)
        if labels is not None:
            self.labels.add(labels)
        if "inputs" in self.job.args.include_for_metrics and isinstance(tensors, Mapping):
            self.inputs.add(tensors[getattr(self.job.model, "main_input_name", "input_ids")])

    def finish(self, prefix: str, begun: float, args: Any) -> PredictionOutput:
        """Computes the metrics over all batches."""
        predictions, labels = self.predictions.get_arrays(), self.labels.get_arrays()
        metrics: dict[str, Any] = {}
        if self.job.compute_metrics is not None and predictions is not None and labels is not None:
            more = {"inputs": self.inputs.get_arrays()} if "inputs" in args.include_for_metrics else {}
            metrics = dict(self.job.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **more)))
        metrics = denumpify_detensorize(metrics)
        if self.counted:
            metrics["loss"] = self.total / self.counted
        metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}
        steps = ceil(self.rows / (args.per_device_eval_batch_size * args.plan.dp))
        metrics |= speed_metrics(prefix, begun, num_samples=self.rows, num_steps=steps)
        return PredictionOutput(predictions=predictions, label_ids=labels, metrics=metrics)


def _batches(job: RankJob, session: Session, dataset: Any, *, whole: bool) -> Iterator[Own]:
    """Yields the batches in order.

    With `whole` they have all rows, because every rank compares labels. Otherwise they have this data-parallel rank's rows.
    """
    source: Source = job.reader.source(dataset)
    rows = StepRows(job.args.per_device_eval_batch_size, 1, session.parallel.dp)
    if not whole:
        source = session.source_for_rank(source)
    if source.size is None:
        return streamed_steps(source, rows, Position(0, 0))
    sampler = Sampler(source.size, rows, source.seed, shuffle=False, drop_last=job.args.dataloader_drop_last)
    return numbered_steps(source, sampler, Position(0, 0))


def _labels(tensors: Given, job: RankJob) -> Any:
    """Returns the labels that predictions are compared with, or None if the batch has no labels."""
    if not isinstance(tensors, Mapping):
        return tensors[-1] if len(tensors) > 1 else None
    names = job.args.label_names or find_labels(type(job.model)) or [n for n in TARGETS if n in tensors][:1]
    found = [tensors[name] for name in names if name in tensors]
    if not found or len(found) < len(names):
        return None
    return found[0] if len(found) == 1 else tuple(found)


def _rows(tensors: Given) -> int:
    first = next(iter(tensors.values())) if isinstance(tensors, Mapping) else tensors[0]
    return int(first.shape[0])
