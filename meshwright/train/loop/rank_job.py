"""What a rank is sent: a prepared run, the model, and the user's own functions and data, as data and no trainer."""

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
from meshwright.train.loop.between_trainings import Carried
from meshwright.train.loop.traced_steps import Traced
from meshwright.train.prepared import PreparedRun
from meshwright.train.session.speed import Speed


@dataclass(frozen=True)
class RankJob:
    """What every job on ranks needs: training, evaluation, prediction, generation, saving."""

    run: PreparedRun
    args: TrainingArguments
    model: nn.Module
    skeleton: Skeleton | None
    """The sketch that `model` belongs to, where it has no weights yet."""
    weights: Path | None
    """Files with the weights of a trained sketch."""
    reader: RowReader
    optimizers: tuple[Any, Any]
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    callbacks: list[TrainerCallback]
    processing_class: Any
    compute_metrics: Callable[[Any], Mapping[str, float]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    state: TrainerState
    board_folder: Path
    """Where TensorBoard's files go."""

    @property
    def folder(self) -> Path:
        """Where checkpoints, log and model go."""
        return output_folder(self.args)

    @property
    def heard(self) -> list[TrainerCallback]:
        """The callbacks that are told of phases: those of rank 0."""
        return self.callbacks if self.args.process_index == 0 else []


@dataclass(frozen=True)
class TrainJob:
    """What training needs besides."""

    train_dataset: Any
    eval_dataset: Any
    resume: str | bool | None = None
    """A checkpoint's folder, True for the last good one, or None to start anew."""
    carried: Carried | None = None
    """What the optimizers of the last `train()` have gathered."""
    traced: Traced | None = None
    speed: Speed | None = None
    """The clock of the run, with the operations of one row and of one token."""


def output_folder(args: TrainingArguments) -> Path:
    """Where checkpoints, log and model go."""
    return Path(args.output_dir or "trainer_output")


def trained_weights(args: TrainingArguments) -> Path:
    """Where the weights of a trained sketch are."""
    return output_folder(args) / "trained"
