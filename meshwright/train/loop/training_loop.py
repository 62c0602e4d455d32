"""The training loop of one rank, with the events, logs and defaults of the Hugging Face Trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import ceil, nan
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput, speed_metrics

from meshwright.errors import MeshwrightError
from meshwright.runtime.stage.batch import Own
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.data.batches import Position, Source, numbered_steps, streamed_steps
from meshwright.train.data.sampler import Sampler
from meshwright.train.loop.between_trainings import KeptOptimizerState
from meshwright.train.loop.callbacks import RunCallbacks
from meshwright.train.loop.evaluation import predict_on
from meshwright.train.loop.loss_sums import LossSums
from meshwright.train.loop.rank_job import RankJob
from meshwright.train.loop.segment_length import segment_length
from meshwright.train.loop.traced_steps import Tracing
from meshwright.train.session.segment import StepResult
from meshwright.train.session.session import Session
from meshwright.train.session.speed import Speed
from meshwright.train.setup.all_ranks import peaks
from meshwright.train.setup.start_phases import phase

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """The result that a rank returns after training."""

    output: TrainOutput
    state: TrainerState
    callbacks: list[TrainerCallback]
    weights: dict[str, Tensor]
    optimizer_state: KeptOptimizerState | None = None
    peaks: tuple[int, ...] = ()


@dataclass(frozen=True)
class EvaluationResult:
    """The result that a rank returns after evaluation."""

    metrics: dict[str, float]
    state: TrainerState
    callbacks: list[TrainerCallback]


@dataclass(frozen=True)
class RunLength:
    """How long training runs: its epochs and its total number of steps. `sampler` is None for an iterable data set."""

    sampler: Sampler | None
    epochs: int
    max_steps: int

    @classmethod
    def of(cls, args: Any, source: Source) -> RunLength:
        """Computes the length from the arguments and the size of the data set."""
        if source.size is None:
            if args.max_steps <= 0:
                raise MeshwrightError("the length of an iterable data set is unknown: max_steps is needed", fix="max_steps=1000")
            return cls(None, 1 << 62, args.max_steps)
        shuffle = args.train_sampling_strategy == "random"
        sampler = Sampler(source.size, args.rows, source.seed, shuffle=shuffle, drop_last=args.dataloader_drop_last)
        if args.max_steps > 0:
            return cls(sampler, ceil(args.max_steps / sampler.steps), args.max_steps)
        return cls(sampler, ceil(args.num_train_epochs), ceil(args.num_train_epochs * sampler.steps))

    def batches(self, source: Source, args: Any, start: Position) -> Iterator[Own]:
        """Yields the batches of an epoch, starting at a position."""
        if self.sampler is None:
            return streamed_steps(source, args.rows, start)
        return numbered_steps(source, self.sampler, start)

    def epoch_at(self, at: Position) -> float:
        """Returns the number of epochs, with a fraction, that are complete after the step at this position."""
        if self.sampler is None:
            return at.epoch + (at.step + 1) / self.max_steps
        return at.epoch + self.sampler.progress(at.step)


@dataclass
class Loop:
    """The training loop of one rank."""

    job: RankJob
    session: Session
    source: Source
    length: RunLength
    callbacks: RunCallbacks
    state: TrainerState
    eval_dataset: Any = None
    checkpoints: Checkpoints | None = None
    start: Position = field(default_factory=lambda: Position(0, 0))
    losses: LossSums = field(default_factory=LossSums)
    speed: Speed = field(default_factory=Speed)
    tracing: Tracing | None = None
    peaks: tuple[int, ...] = ()
    asked: tuple[bool, bool] = (False, False)
    """Whether a callback has asked for an evaluation or a checkpoint inside a segment."""

    def run(self) -> TrainOutput:
        """Trains until the last step."""
        args, state, begun, first = self.job.args, self.state, time.time(), self.state.global_step
        self.losses.logged_at, self.position = first, self.start
        self._notify("on_train_begin")
        if args.eval_on_start:
            self._evaluate()
        self.speed.go()
        for epoch in range(self.start.epoch, self.length.epochs):
            done = state.global_step >= self.length.max_steps  # the resumed run was already complete
            if done or self.callbacks.control.should_training_stop or not self._epoch(epoch):
                break
        if self.tracing is not None:
            self.tracing.finish()  # training may stop before the last step that should be traced
        self.losses.total += self.losses.since_log
        steps = state.global_step - first
        metrics = speed_metrics("train", begun, self.speed.rows, steps, self.speed.tokens or None)
        self.peaks = peaks(self.session.settings.device)
        metrics |= {
            "train_step_time": round(self.speed.step_s, 6),
            "train_peak_mem_bytes": max(self.peaks),
            "total_flos": state.total_flos,
            "train_loss": self.losses.total / max(steps, 0.001) if self.losses.any_counted or not steps else nan,
        }
        metrics |= {"nan_losses": count} if (count := self.losses.nonfinite_total + self.losses.nonfinite) else {}
        self.log(metrics)
        self._load_best()
        self._notify("on_train_end")
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def _epoch(self, epoch: int) -> bool:
        """Trains for one epoch. Returns False if the data set returned no batch."""
        self._notify("on_epoch_begin")
        begin = self.start.step if epoch == self.start.epoch else 0
        step, batches = begin, self.length.batches(self.source, self.job.args, Position(epoch, begin))
        while segment := list(islice(batches, self._segment_length())):
            self._segment(Position(epoch, step), segment)
            step += len(segment)
            control = self.callbacks.control
            if control.should_epoch_stop or control.should_training_stop:
                break
        if step == begin:
            return epoch == self.start.epoch and begin > 0
        self._notify("on_epoch_end")
        self._log_evaluate_save()
        return True

    def _segment_length(self) -> int:
        """Returns how many steps to train before the next one at which something must happen: 1, or more without a flush."""
        traced = self.tracing.steps_to_border if self.tracing is not None else None
        return segment_length(self.job.args, self.state, traced) if self.session.run.is_segmented else 1

    def _segment(self, at: Position, batches: list[Own]) -> None:
        """Trains some steps, starting at a position. The events of all steps but the first follow when all have been trained."""
        self._notify("on_step_begin")
        results = self._train_on(batches)
        seconds = self.speed.elapsed_s / len(results)
        for number, result in enumerate(results):
            if number:
                self._notify("on_step_begin")
            self._count(Position(at.epoch, at.step + number), result, seconds)
            self._log_evaluate_save(ends=number == len(results) - 1)
        self.speed.go()

    def _count(self, at: Position, result: StepResult, seconds: float) -> None:
        """Counts a step that has been trained, and notifies the callbacks."""
        args, state = self.job.args, self.state
        state.total_flos += self.speed.add(result.rows, result.tokens, seconds)
        if not self.losses.add(result, state.global_step, filtered=args.logging_nan_inf_filter) and state.is_world_process_zero:
            what = "the loss of step %d is %s; the log shows the mean of the other steps (logging_nan_inf_filter)"
            _log.warning(what, state.global_step + 1, result.loss)
        self._notify("on_optimizer_step")
        state.global_step += 1
        state.epoch = self.length.epoch_at(at)
        self.position = Position(at.epoch, at.step + 1)
        self._notify("on_step_end")

    def _train_on(self, batches: list[Own]) -> list[StepResult]:
        """Runs some steps, with tracing if requested. The first of a run are reported as a start-up phase."""
        train = self.session.train if self.tracing is None else self.tracing.train
        if self.speed.steps:
            return train(batches)
        with phase(self.job.phase_listeners, "first step"):
            return train(batches)

    def _log_evaluate_save(self, *, ends: bool = True) -> None:
        """Logs, evaluates and saves if the callbacks have set the flags for it.

        Inside a segment the weights are already those of its end. A callback that asks for more than a log gets it there.
        """
        control, state = self.callbacks.follow_rank_zero(), self.state
        if control.should_log and state.global_step > self.losses.logged_at:
            self.log(self.losses.drain(state.global_step) | self.speed.drain())
        if not ends:
            self.asked = (self.asked[0] or control.should_evaluate, self.asked[1] or control.should_save)
            return
        control.should_evaluate, control.should_save = (
            control.should_evaluate or self.asked[0],
            control.should_save or self.asked[1],
        )
        self.asked = (False, False)
        if control.should_evaluate:
            self._evaluate()
            control = self.callbacks.follow_rank_zero()
        if control.should_save:
            self._save()
            self._notify("on_save")

    def _evaluate(self) -> None:
        """Evaluates, notifies the callbacks, and records whether this model is the best so far."""
        metrics = self.evaluate(self.eval_dataset, "eval")
        wanted = self.job.args.metric_for_best_model
        if wanted is None:
            return
        value = metrics.get(name := wanted if wanted.startswith("eval_") else f"eval_{wanted}")
        if value is None:
            raise MeshwrightError(
                f"metric_for_best_model={wanted!r} is not among {', '.join(metrics)}", fix="the name of one of these metrics"
            )
        self.session.rates.step(value)
        best, sign = self.state.best_metric, 1 if self.job.args.greater_is_better else -1
        better = best is None or sign * value > sign * best
        if better:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        if self.job.args.save_strategy == "best":
            self.callbacks.control.should_save = better
        assert name

    def evaluate(self, datasets: Any, prefix: str) -> dict[str, float]:
        """Returns the loss and metrics of one data set, or of a mapping of data sets. Also logs them and notifies callbacks."""
        if datasets is None:
            raise MeshwrightError("there is no eval_dataset to evaluate", fix="Trainer(eval_dataset=...), or eval_strategy='no'")
        if isinstance(datasets, dict):
            parts = [self.evaluate(dataset, f"{prefix}_{name}") for name, dataset in datasets.items()]
            return {name: value for part in parts for name, value in part.items()}
        loss_only = self.job.compute_metrics is None
        metrics = predict_on(self.job, self.session, datasets, prefix, loss_only=loss_only).metrics
        assert metrics is not None
        self.log(metrics)
        self._notify("on_evaluate", metrics=metrics)
        return metrics

    def _save(self) -> None:
        """Saves a checkpoint of this step. The best checkpoint is never deleted."""
        assert self.checkpoints is not None
        state, path = self.state, self.job.folder
        if state.best_global_step:
            state.best_model_checkpoint = str(path / f"checkpoint-{state.best_global_step}")
        keep = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
        rows = self.job.args.rows.step * self.position.step
        data = {"epoch": self.position.epoch, "rows": rows}
        self.checkpoints.save(state.global_step, data=data, extra=self.saved(), keep=keep)

    def _load_best(self) -> None:
        best = self.state.best_model_checkpoint
        if self.job.args.load_best_model_at_end and best is not None:
            assert self.checkpoints is not None
            self.checkpoints.resume(best)

    def log(self, logs: dict[str, float]) -> None:
        """Appends a log to the history and notifies the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._notify("on_log", logs=logs)

    def _notify(self, event: str, **more: Any) -> None:
        self.callbacks(event, self.job.args, self.state, **more)

    def saved(self) -> dict[str, Any]:
        """Returns the part of a checkpoint that is not tensors."""
        state = {**asdict(self.state), "stateful_callbacks": self.callbacks.states()}
        return {"state": state, "rates": self.session.rates.state_dict(), "scale": self.session.scale}
