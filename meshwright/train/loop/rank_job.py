"""The data that a rank receives for a job: a prepared run, the model, and the user's functions and data sets.

Ranks do not receive the Trainer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState

from meshwright.capture.weights.sketch import Skeleton
from meshwright.train.arguments import TrainingArguments
from meshwright.train.data.row_reader import RowReader
from meshwright.train.loop.between_trainings import KeptOptimizerState
from meshwright.train.loop.traced_steps import Traced
from meshwright.train.prepared import PreparedRun
from meshwright.train.session.speed import Speed


@dataclass(frozen=True)
class RankJob:
    """The data that every job needs: training, evaluation, prediction, generation and saving."""

    run: PreparedRun
    args: TrainingArguments
    model: nn.Module
    skeleton: Skeleton | None
    """The sketch that `model` belongs to, if the model has no weights yet. None otherwise."""
    weights: Path | None
    """The folder with the weights of a trained sketch."""
    reader: RowReader
    optimizers: tuple[Any, Any]
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    callbacks: list[TrainerCallback]
    processing_class: Any
    compute_metrics: Callable[[Any], Mapping[str, float]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    state: TrainerState
    board_folder: Path
    """The folder for TensorBoard's files."""

    @property
    def folder(self) -> Path:
        """The folder for checkpoints, the log and the model."""
        return output_folder(self.args)

    @property
    def phase_listeners(self) -> list[TrainerCallback]:
        """The callbacks that are notified of start-up phases. Empty on all ranks except rank 0."""
        return self.callbacks if self.args.process_index == 0 else []


@dataclass(frozen=True)
class TrainJob:
    """The data that only training needs."""

    train_dataset: Any
    eval_dataset: Any
    resume: str | bool | None = None
    """The folder of a checkpoint, True for the last good checkpoint in output_dir, or None for a new run."""
    optimizer_state: KeptOptimizerState | None = None
    """The optimizer state after the last `train()`."""
    traced: Traced | None = None
    speed: Speed | None = None
    """The speed counter of the run, with the operations per row and per token."""


def output_folder(args: TrainingArguments) -> Path:
    """Returns the folder for checkpoints, the log and the model."""
    return Path(args.output_dir or "trainer_output")


def trained_weights(args: TrainingArguments) -> Path:
    """Returns the folder with the weights of a trained sketch."""
    return output_folder(args) / "trained"
