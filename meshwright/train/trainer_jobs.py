"""The half of a `Trainer` that prepares runs, makes the jobs that ranks receive, and starts workers for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState

from meshwright.capture.weights.sketch import Skeleton
from meshwright.errors import MeshwrightError
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.stage.batch import Given
from meshwright.train.arguments import TrainingArguments
from meshwright.train.auto.auto_plan import auto_request, batch_of, chosen_plan
from meshwright.train.data.collate import Collate, Collator, accepted
from meshwright.train.data.row_reader import RowReader
from meshwright.train.inputs import trainer_inputs
from meshwright.train.inputs.gradient_hooks import refuse_lost_hooks
from meshwright.train.loop import on_rank
from meshwright.train.loop.rank_job import RankJob, output_folder
from meshwright.train.prepare_for_trainer import TrainerInputs, prepare_for_trainer, refuse_rows
from meshwright.train.prepared import PreparedRun
from meshwright.train.setup.own_weights import refuse_changed_files
from meshwright.train.setup.start_phases import phase
from meshwright.train.setup.where import launched, refuse_world, run_on_ranks


class TrainerJobs:
    """Holds what a user gave to a Trainer, and turns it into jobs. `Trainer` sets the attributes."""

    args: TrainingArguments
    model: Any
    skeleton: Skeleton | None
    weights: Path | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    data_collator: Collator
    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[[Any], Mapping[str, float]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    callbacks: list[TrainerCallback]
    optimizers: tuple[Any, Any]
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    state: TrainerState
    check_capture: bool
    prepared: PreparedRun | None
    _columns: frozenset[str]
    _board: str
    _write_times: dict[str, int]
    _given: Workers | None
    _pool: Workers | None

    def is_world_process_zero(self) -> bool:
        """Returns whether this process is rank 0, which logs and writes files for all ranks."""
        return self.args.process_index == 0

    @property
    def folder(self) -> Path:
        """The folder for checkpoints, the log and the model."""
        return output_folder(self.args)

    @property
    def module(self) -> nn.Module:
        """The model as one module; a list of layers is wrapped."""
        return self.model if isinstance(self.model, nn.Module) else nn.ModuleList(self.model)

    def job(self, dataset: Any, *, trains: bool = False) -> RankJob:
        """Returns the data that ranks receive for this data set. Raises, before any worker starts, if the run is not possible."""
        return self.job_and_example(dataset, trains=trains)[0]

    def evaluation_job(self, dataset: Any) -> RankJob:
        """Returns the same for evaluation. Raises if the captured model cannot be evaluated."""
        job = self.job(dataset)
        job.run.evaluation.refuse()
        return job

    @property
    def reader(self) -> RowReader:
        """The reader that converts rows of a data set to tensors."""
        args, run = self.args, self.prepared
        columns = accepted(self.model, args.label_names) if args.remove_unused_columns else None
        seed = args.seed if args.data_seed is None else args.data_seed
        known = () if run is None else run.vocabularies
        return RowReader(Collate(self.data_collator, columns), seed, args.dataloader_num_workers, known)

    def job_and_example(self, dataset: Any, *, trains: bool) -> tuple[RankJob, Given]:
        """Returns a job, and the example that its run was prepared with."""
        if self.args.auto is not None and self.args.planned is None:
            return self._planned_job(dataset, trains=trains)
        plan = self.args.plan
        refuse_world(plan)
        if plan.processes > 1 and not launched():
            trainer_inputs.refuse_checkpointing(self.model)
        if trains:
            refuse_lost_hooks(self.module, plan.processes, sketched=self.skeleton is not None)
        if self.weights is not None and not launched():
            refuse_changed_files(self.weights, self._write_times)
        source = self.reader.source(dataset)
        example = source.example(self.args.example_rows)
        columns = frozenset(map(str, example)) if isinstance(example, Mapping) else frozenset()
        if self.prepared is None or self.prepared.parallel != plan or columns != self._columns:
            self._columns = columns  # a data set without labels has another graph
            inputs = TrainerInputs(
                self.args, self.skeleton or self.model, self.weights, self.compute_loss_func, self.check_capture
            )
            self.prepared = prepare_for_trainer(
                inputs, source, example, trains=trains, phase=partial(phase, self._phase_listeners)
            )
        elif trains:
            refuse_rows(self.args, self.prepared.flat, source, example, own_loss=self.compute_loss_func is not None)
        return self._job(self.prepared), example

    def _planned_job(self, dataset: Any, *, trains: bool) -> tuple[RankJob, Given]:
        """Chooses the plan of `parallel="auto"`, and returns its job."""
        source = self.reader.source(dataset)
        own = None if self.optimizer_cls_and_kwargs is None else self.optimizer_cls_and_kwargs[0]
        own = own if self.optimizers[0] is None else type(self.optimizers[0])
        example = source.example(self.args.example_rows)
        request = auto_request(self.args, self.model, example, source.size if trains else None, own)
        with phase(self._phase_listeners, "plan"):
            planned = chosen_plan(request)
        self.args.take_plan(planned, batch_of(planned))
        return self.job_and_example(dataset, trains=trains)

    def _job(self, run: PreparedRun) -> RankJob:
        return RankJob(
            run=run,
            args=self.args,
            model=self.module,
            skeleton=self.skeleton,
            weights=self.weights,
            reader=self.reader,
            optimizers=self.optimizers,
            optimizer_cls_and_kwargs=self.optimizer_cls_and_kwargs,
            callbacks=self.callbacks,
            processing_class=self.processing_class,
            compute_metrics=self.compute_metrics,
            preprocess_logits_for_metrics=self.preprocess_logits_for_metrics,
            state=self.state,
            board_folder=self.folder / self._board,
        )

    def any_dataset(self) -> Any:
        """Returns a data set to prepare a run with."""
        first = self.eval_dataset if self.train_dataset is None else self.train_dataset
        if first is None:
            raise MeshwrightError("there is no data set to capture the model with", fix="Trainer(train_dataset=...)")
        return next(iter(first.values())) if isinstance(first, dict) else first

    @property
    def _phase_listeners(self) -> list[TrainerCallback]:
        """The callbacks that are notified of start-up phases. Empty on all ranks except rank 0."""
        return self.callbacks if self.is_world_process_zero() else []

    def run_on_ranks(self, work: Callable[..., Any], *more: Any) -> list[Any]:
        """Calls `work(*more)` on every rank of the plan. Returns the results that this process can see, rank 0 first."""
        return run_on_ranks(work, *more, parallel=self.args.plan, workers=self._workers)

    def _workers(self) -> Workers:
        """Returns the workers of this trainer. They start on first use and stop when the trainer is deleted."""
        trainer_inputs.refuse_loaders(self.args.dataloader_num_workers, self.args.plan.processes)
        if self._given is not None:
            return self._given
        if self._pool is None:
            with phase(self._phase_listeners, "start workers"):
                self._pool = Workers(
                    self.args.plan.started, preload=[on_rank.__name__, *{type(self.model).__module__} - {"__main__"}]
                )
            weakref.finalize(self, self._pool.close)
        return self._pool
