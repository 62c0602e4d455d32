"""Runs a job on one rank: opens the prepared run, trains or evaluates, and returns the result to the parent process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import TrainerState, set_seed
from transformers.trainer_utils import PredictionOutput

from meshwright.errors import MeshwrightError
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.checkpoint import folder_lock
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.data.batches import Position, has_rows
from meshwright.train.inputs.usable_arguments import refuse_folder
from meshwright.train.loop.between_trainings import kept_optimizer_state, restore_optimizer_state
from meshwright.train.loop.callbacks import RunCallbacks
from meshwright.train.loop.evaluation import predict_on
from meshwright.train.loop.rank_job import RankJob, TrainJob, trained_weights
from meshwright.train.loop.traced_steps import Tracing, remove_measurement
from meshwright.train.loop.training_loop import EvaluationResult, Loop, RunLength, TrainResult
from meshwright.train.optimizer.make_optimizer import rates_for
from meshwright.train.session.save_model import save
from meshwright.train.session.session import Session
from meshwright.train.session.speed import Speed
from meshwright.train.setup.all_ranks import agree, refuse_differences
from meshwright.train.setup.own_weights import drop_others, materialise
from meshwright.train.setup.start_phases import phase
from meshwright.train.setup.where import device_for, keeps_own_objects


def train_on_rank(job: RankJob, work: TrainJob) -> TrainResult:
    """Trains on this rank. A collective call: all ranks must call it. Rank 0 locks the output folder meanwhile."""
    first = dist.get_rank() == 0
    agree(lambda: _lock_folder(job.folder) if first else None)
    try:
        return _train_on_rank(job, work)
    finally:
        if first:
            folder_lock.release(job.folder)


def _lock_folder(folder: Path) -> None:
    refuse_folder("output_dir", folder)
    folder_lock.take(folder)


def _train_on_rank(job: RankJob, work: TrainJob) -> TrainResult:
    loop = _loop(job, work)
    session = loop.session
    try:
        output = loop.run()
    except BaseException:
        if loop.checkpoints is not None:
            loop.checkpoints.settle()
        raise
    if loop.checkpoints is not None:
        loop.checkpoints.close()
    weights = {}
    if job.skeleton is not None:
        if dist.get_world_size() > 1:
            session.export(trained_weights(job.args))
    elif keeps_own_objects():
        session.broadcast_weights()
    else:
        weights = session.owned_weights()
    kept = None if job.skeleton is not None else kept_optimizer_state(session, own_schedule=job.optimizers[1] is not None)
    session.close()
    return TrainResult(output, loop.state, job.callbacks, weights, kept, loop.peaks)


def _loop(job: RankJob, work: TrainJob) -> Loop:
    """Returns the training loop, set to its first step or to the step of a checkpoint."""
    set_seed(job.args.seed)
    source = job.reader.source(work.train_dataset)
    length = RunLength.of(job.args, source)
    refuse_differences(_equal_on_all_ranks(job, work, length))
    trace = None if work.traced is None else Trace()
    with phase(job.phase_listeners, "set up ranks"):
        session = session_for(job, length.max_steps, trace)
    loop = Loop(job, session, session.source_for_rank(source), length, callbacks_for(job, session), _new_state(job, length))
    loop.eval_dataset, loop.speed = work.eval_dataset, work.speed or Speed()
    if work.resume or job.args.save_strategy != "no":
        limit, processing = job.args.save_total_limit, job.processing_class
        loop.checkpoints = Checkpoints(job.folder, session.engine, limit=limit, model=job.model, processing=processing)
    if work.optimizer_state is not None and not work.resume:
        restore_optimizer_state(session, work.optimizer_state)
    if work.resume:
        _resume(loop, None if work.resume is True else str(work.resume))
    if trace is not None and work.traced is not None:
        loop.tracing = Tracing.of(work.traced, session, trace, length.max_steps - loop.state.global_step, job.folder)
    elif not work.resume and loop.state.is_world_process_zero:
        remove_measurement(job.folder)
    return loop


def _equal_on_all_ranks(job: RankJob, work: TrainJob, length: RunLength) -> dict[str, Any]:
    """Returns the values that must be equal on all ranks, by name. Under torchrun each rank reads its own arguments and data."""
    args, sets = job.args, work.eval_dataset
    by_name = sets if isinstance(sets, dict) else {"eval_dataset": sets}
    rows = {f"the number of rows of {name}": len(d) if has_rows(d) else None for name, d in by_name.items()}
    if length.sampler is not None:
        rows |= {"the number of rows of train_dataset": length.sampler.size, "the seed of the data": length.sampler.seed}
    steps = {name: getattr(args, name) for name in ("seed", "logging_steps", "eval_steps", "save_steps", "fp16", "bf16")}
    return {**rows, "max_steps": length.max_steps, "resume_from_checkpoint": work.resume, **steps}


def evaluate_on_rank(job: RankJob, dataset: Any, prefix: str) -> EvaluationResult:
    """Evaluates on this rank."""
    state = job.state
    with _session_without_training(job) as session:
        first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        callbacks = callbacks_for(job, session)
        _set_process_flags(state, job)
        loop = Loop(job, session, job.reader.source(first), RunLength(None, 0, 0), callbacks, state)
        try:
            metrics = loop.evaluate(dataset, prefix)
        finally:
            callbacks.close()
    return EvaluationResult(metrics, state, job.callbacks)


def predict_on_rank(job: RankJob, dataset: Any, prefix: str) -> PredictionOutput:
    """Predicts on this rank."""
    with _session_without_training(job) as session:
        return predict_on(job, session, dataset, prefix, loss_only=job.args.prediction_loss_only)


def save_on_rank(job: RankJob, folder: Path) -> None:
    """Writes this rank's part of the model."""
    with _session_without_training(job) as session:
        save(session, folder)


def generate_on_rank(job: RankJob, input_ids: Tensor, options: dict[str, Any]) -> Tensor:
    """Generates the next tokens of each row on this rank."""
    with _session_without_training(job) as session:
        return session.generate(input_ids, **options)


@contextmanager
def _session_without_training(job: RankJob) -> Iterator[Session]:
    """Opens a session. After it, a model that belongs to the user has whole parameters again, as before."""
    with session_for(job) as session:
        yield session
        if keeps_own_objects() and job.skeleton is None and session.engine.divides_parameters:
            session.broadcast_weights()


def _resume(loop: Loop, folder: str | None) -> None:
    """Restores the loop from a checkpoint."""
    assert loop.checkpoints is not None
    found = loop.checkpoints.resume(folder)
    if found is None:
        raise MeshwrightError(
            f"there is no checkpoint in {loop.job.args.output_dir}", fix="train() without resume_from_checkpoint"
        )
    extra, data, rows = dict(found.extra or {}), dict(found.data or {}), loop.job.args.rows.step
    if data["rows"] % rows:
        raise MeshwrightError(
            f"{found.folder.name} was saved after {data['rows']} rows of its epoch, which is not a whole number of steps "
            f"of {rows} rows",
            fix="the batch size of the run that saved it",
        )
    loop.session.rates.load_state_dict(extra["rates"])
    loop.session.steps = found.step
    fresh, kept = loop.state, extra["state"]
    for name in ("epoch", "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos"):
        setattr(fresh, name, kept[name])
    if loop.job.args.restore_callback_states_from_checkpoint:
        loop.callbacks.restore(kept["stateful_callbacks"])
    if not loop.job.args.ignore_data_skip:
        loop.start = Position(data["epoch"], data["rows"] // rows)
        if loop.length.sampler is not None and loop.start.step >= loop.length.sampler.steps:
            loop.start = Position(data["epoch"] + 1, 0)


def session_for(job: RankJob, steps: int = 1, trace: Trace | None = None) -> Session:
    """Opens the prepared run of a job on this rank. The learning-rate schedule covers `steps` training steps."""
    args, run = job.args, job.run
    rates = rates_for(job.model, args, job.optimizers, job.optimizer_cls_and_kwargs, steps=steps)
    rules = Rules(clip=args.max_grad_norm or float("inf"))
    device = device_for(args.use_cpu)
    settings = run.settings(optimizer=rates.optimizer, rules=rules, seed=args.seed, device=device, pieces=rates.adopt)
    fill: Any = None if keeps_own_objects() else partial(drop_others, job.model)
    if job.skeleton is not None:
        fill = partial(materialise, job.skeleton, job.weights)
    return Session(run, job.model, rates, settings, trace=trace, fill=fill)


def callbacks_for(job: RankJob, session: Session) -> RunCallbacks:
    """Returns the callbacks of a run."""
    return RunCallbacks(
        job.callbacks,
        list(job.args.report_to or ()),
        bar=not job.args.disable_tqdm,
        folder=job.board_folder,
        model=job.model,
        processing_class=job.processing_class,
        optimizer=session.rates.reference,
        lr_scheduler=session.rates.scheduler,
    )


def _new_state(job: RankJob, length: RunLength) -> TrainerState:
    """Returns the trainer state before the first step."""
    state: Any = TrainerState(max_steps=length.max_steps, num_train_epochs=length.epochs)
    state.compute_steps(job.args, length.max_steps)
    state.train_batch_size = job.args.train_batch_size
    _set_process_flags(state, job)
    return state


def _set_process_flags(state: TrainerState, job: RankJob) -> None:
    """Sets whether this rank logs for all ranks. The state may come from another rank, with other flags."""
    state.is_world_process_zero = dist.get_rank() == 0
    state.is_local_process_zero = job.args.local_process_index == 0
