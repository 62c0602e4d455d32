"""The training loop of one rank, with the events, logs and habits of the Hugging Face Trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import ceil, isfinite, nan
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
from meshwright.train.loop.between_trainings import Carried
from meshwright.train.loop.callbacks import Watchers
from meshwright.train.loop.evaluation import predict_on
from meshwright.train.loop.rank_job import RankJob
from meshwright.train.loop.traced_steps import Tracing
from meshwright.train.session.session import Session, StepResult
from meshwright.train.session.speed import Speed
from meshwright.train.setup.all_ranks import peaks
from meshwright.train.setup.start_phases import phase

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a rank brings back from training."""

    output: TrainOutput
    state: TrainerState
    callbacks: list[TrainerCallback]
    weights: dict[str, Tensor]
    carried: Carried | None = None
    peaks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Judged:
    """What a rank brings back from evaluation."""

    metrics: dict[str, float]
    state: TrainerState
    callbacks: list[TrainerCallback]


@dataclass(frozen=True)
class Course:
    """How long training goes on: `steps` per epoch (None where nobody knows), epochs, and steps in all."""

    sampler: Sampler | None
    epochs: int
    max_steps: int

    @classmethod
    def of(cls, args: Any, source: Source) -> Course:
        """From arguments and the size of the data."""
        if source.size is None:
            if args.max_steps <= 0:
                raise MeshwrightError("nobody knows how long an iterable data set is", fix="max_steps=1000")
            return cls(None, 1 << 62, args.max_steps)
        shuffle = args.train_sampling_strategy == "random"
        sampler = Sampler(source.size, args.rows, source.seed, shuffle=shuffle, drop_last=args.dataloader_drop_last)
        if args.max_steps > 0:
            return cls(sampler, ceil(args.max_steps / sampler.steps), args.max_steps)
        return cls(sampler, ceil(args.num_train_epochs), ceil(args.num_train_epochs * sampler.steps))

    def batches(self, source: Source, args: Any, start: Position) -> Iterator[Own]:
        """The batches of an epoch from a position on."""
        if self.sampler is None:
            return streamed_steps(source, args.rows, start)
        return numbered_steps(source, self.sampler, start)

    def epoch_at(self, at: Position) -> float:
        """How many epochs are done once this step is."""
        if self.sampler is None:
            return at.epoch + (at.step + 1) / self.max_steps
        return at.epoch + self.sampler.progress(at.step)


@dataclass
class _Losses:
    """Losses since the last log, and in all."""

    since: float = 0.0
    total: float = 0.0
    logged_at: int = 0
    finite: int = 0
    odd: int = 0
    odd_total: int = 0
    ever: bool = False
    last: StepResult | None = None

    def add(self, result: StepResult, step: int, *, filtered: bool) -> bool:
        """One more step; one that is no number counts as the mean so far, where that is asked for, and False is returned."""
        self.odd += not isfinite(result.loss)
        odd = filtered and not isfinite(result.loss)
        self.since += self.since / (1 + step - self.logged_at) if odd else result.loss
        self.finite += not odd
        self.ever = self.ever or not odd
        self.last = result
        return not odd

    def drain(self, step: int) -> dict[str, float]:
        """What a log says, and a new start; where no step had a number, neither has the log."""
        assert self.last is not None
        logs = {
            "loss": self.since / (step - self.logged_at) if self.finite else nan,
            "grad_norm": self.last.grad_norm,
            "learning_rate": self.last.learning_rate,
        }
        logs |= {"nan_losses": self.odd} if self.odd else {}
        self.odd_total += self.odd
        self.total += self.since
        self.since, self.logged_at, self.finite, self.odd = 0.0, step, 0, 0
        return logs


@dataclass
class Loop:
    """One rank while it trains."""

    job: RankJob
    session: Session
    source: Source
    course: Course
    watchers: Watchers
    state: TrainerState
    eval_dataset: Any = None
    checkpoints: Checkpoints | None = None
    start: Position = field(default_factory=lambda: Position(0, 0))
    losses: _Losses = field(default_factory=_Losses)
    speed: Speed = field(default_factory=Speed)
    tracing: Tracing | None = None
    peaks: tuple[int, ...] = ()

    def run(self) -> TrainOutput:
        """Train to the end."""
        args, state, begun, first = self.job.args, self.state, time.time(), self.state.global_step
        self.losses.logged_at, self.position = first, self.start
        self._tell("on_train_begin")
        if args.eval_on_start:
            self._evaluate()
        self.speed.go()
        for epoch in range(self.start.epoch, self.course.epochs):
            done = state.global_step >= self.course.max_steps  # a run that had ended is resumed
            if done or self.watchers.control.should_training_stop or not self._epoch(epoch):
                break
        if self.tracing is not None:
            self.tracing.finish()  # a run may end before the last step that was to be traced
        self.losses.total += self.losses.since
        steps = state.global_step - first
        metrics = speed_metrics("train", begun, self.speed.rows, steps, self.speed.tokens or None)
        self.peaks = peaks(self.session.settings.device)
        metrics |= {
            "train_step_time": round(self.speed.step_s, 6),
            "train_peak_mem_bytes": max(self.peaks),
            "total_flos": state.total_flos,
            "train_loss": self.losses.total / max(steps, 0.001) if self.losses.ever or not steps else nan,
        }
        metrics |= {"nan_losses": odd} if (odd := self.losses.odd_total + self.losses.odd) else {}
        self.log(metrics)
        self._load_best()
        self._tell("on_train_end")
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def _epoch(self, epoch: int) -> bool:
        """One pass through the data; False where it gave nothing."""
        self._tell("on_epoch_begin")
        begin = self.start.step if epoch == self.start.epoch else 0
        step = begin - 1
        for step, batch in enumerate(self.course.batches(self.source, self.job.args, Position(epoch, begin)), begin):
            self._step(Position(epoch, step), batch)
            control = self.watchers.control
            if control.should_epoch_stop or control.should_training_stop:
                break
        if step < begin:
            return epoch == self.start.epoch and begin > 0
        self._tell("on_epoch_end")
        self._act()
        return True

    def _step(self, at: Position, batch: Own) -> None:
        args, state = self.job.args, self.state
        self._tell("on_step_begin")
        result = self._train_on(batch)
        state.total_flos += self.speed.add(result.rows, result.tokens)
        if not self.losses.add(result, state.global_step, filtered=args.logging_nan_inf_filter) and state.is_world_process_zero:
            what = "the loss of step %d is %s; what is logged is the mean of the other steps (logging_nan_inf_filter)"
            _log.warning(what, state.global_step + 1, result.loss)
        self._tell("on_optimizer_step")
        state.global_step += 1
        state.epoch = self.course.epoch_at(at)
        self.position = Position(at.epoch, at.step + 1)
        self._tell("on_step_end")
        self._act()
        self.speed.go()

    def _train_on(self, batch: Own) -> StepResult:
        """One step, traced where that was asked for; the first of a run is a phase of its start."""
        step = self.session.step if self.tracing is None else self.tracing.step
        if self.speed.steps:
            return step(batch)
        with phase(self.job.heard, "first step"):
            return step(batch)

    def _act(self) -> None:
        """Log, evaluate and save, as the callbacks have decided."""
        control, state = self.watchers.agree(), self.state
        if control.should_log and state.global_step > self.losses.logged_at:
            self.log(self.losses.drain(state.global_step) | self.speed.drain())
        if control.should_evaluate:
            self._evaluate()
            control = self.watchers.agree()
        if control.should_save:
            self._save()
            self._tell("on_save")

    def _evaluate(self) -> None:
        """Evaluate, tell, and note whether it was the best so far."""
        metrics = self.evaluate(self.eval_dataset, "eval")
        wanted = self.job.args.metric_for_best_model
        if wanted is None:
            return
        value = metrics.get(name := wanted if wanted.startswith("eval_") else f"eval_{wanted}")
        if value is None:
            raise MeshwrightError(
                f"metric_for_best_model={wanted!r} is not among {', '.join(metrics)}", fix="a metric by its name"
            )
        self.session.rates.step(value)
        best, sign = self.state.best_metric, 1 if self.job.args.greater_is_better else -1
        better = best is None or sign * value > sign * best
        if better:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        if self.job.args.save_strategy == "best":
            self.watchers.control.should_save = better
        assert name

    def evaluate(self, datasets: Any, prefix: str) -> dict[str, float]:
        """Loss and metrics of a data set, or of several by name; logged, and told to the callbacks."""
        if datasets is None:
            raise MeshwrightError("there is no eval_dataset to evaluate", fix="Trainer(eval_dataset=...), or eval_strategy='no'")
        if isinstance(datasets, dict):
            parts = [self.evaluate(dataset, f"{prefix}_{name}") for name, dataset in datasets.items()]
            return {name: value for part in parts for name, value in part.items()}
        loss_only = self.job.compute_metrics is None
        metrics = predict_on(self.job, self.session, datasets, prefix, loss_only=loss_only).metrics
        assert metrics is not None
        self.log(metrics)
        self._tell("on_evaluate", metrics=metrics)
        return metrics

    def _save(self) -> None:
        """A checkpoint of this step; the best one is kept."""
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
        """Keep a log and tell the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def _tell(self, event: str, **more: Any) -> None:
        self.watchers(event, self.job.args, self.state, **more)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors."""
        state = {**asdict(self.state), "stateful_callbacks": self.watchers.states()}
        return {"state": state, "rates": self.session.rates.state_dict(), "scale": self.session.scale}
