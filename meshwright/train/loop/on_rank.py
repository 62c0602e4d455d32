"""What every rank does when a trainer trains: read, cut, put together, train, and bring back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from transformers import TrainerState, set_seed
from transformers.trainer_utils import PredictionOutput

from meshwright.errors import MeshwrightError
from meshwright.runtime.stage.batch import Batch, Given
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import LossKind, Objective
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.checkpoint import folder_lock
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.data.batches import Position, Source, has_rows
from meshwright.train.data.vocabulary import vocabularies
from meshwright.train.loop.between_trainings import carried, go_on
from meshwright.train.loop.callbacks import Watchers
from meshwright.train.loop.evaluation import predict_on
from meshwright.train.loop.flops import speed_of
from meshwright.train.loop.loss_functions import OwnLoss, count_for, items
from meshwright.train.loop.report_to import refuse_reporters
from meshwright.train.loop.traced_steps import Tracing, forget
from meshwright.train.loop.training_loop import Course, Judged, Loop, Outcome
from meshwright.train.optimizer.make_optimizer import rates_for
from meshwright.train.session.save_model import save
from meshwright.train.session.session import Session, SessionSettings
from meshwright.train.setup.all_ranks import agree, refuse_differences
from meshwright.train.setup.build_schedule import stages_of
from meshwright.train.setup.captured_layers import layers_for
from meshwright.train.setup.check_capture import Evaluation, Start, check_start
from meshwright.train.setup.loss_additivity import ROWS
from meshwright.train.setup.own_weights import drop_others, ground, materialise
from meshwright.train.setup.saved_bytes import Kept, saved_bytes
from meshwright.train.setup.start_phases import phase
from meshwright.train.setup.usable_arguments import refuse_folder
from meshwright.train.setup.where import device_for, keeps_own_objects, launched

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer


def train_on_rank(trainer: Trainer, resume: str | bool | None) -> Outcome:
    """Train on this rank; all ranks call this together, and the first holds the folder that is written to."""
    first = dist.get_rank() == 0
    agree(lambda: _hold(trainer.folder) if first else None)
    try:
        return _train_on_rank(trainer, resume)
    finally:
        if first:
            folder_lock.release(trainer.folder)


def _hold(folder: Path) -> None:
    refuse_folder("output_dir", folder)
    folder_lock.take(folder)


def _train_on_rank(trainer: Trainer, resume: str | bool | None) -> Outcome:
    set_seed(trainer.args.seed)
    source = trainer.source(trainer.train_dataset)
    course = Course.of(trainer.args, source)
    refuse_differences(_agreed(trainer, course, resume))
    example, trace = source.example(trainer.example_rows), None if trainer.traced is None else Trace()
    with phase(trainer, "set up ranks"):
        session = session_for(trainer, example, course.max_steps, trace)
    source = session.reads(source)
    loop = Loop(trainer, session, source, course, watchers_for(trainer, session), new_state(trainer, course))
    loop.speed = speed_of(trainer, example)
    if resume or trainer.args.save_strategy != "no":
        loop.checkpoints = Checkpoints(
            trainer.folder,
            session.engine,
            limit=trainer.args.save_total_limit,
            model=trainer.module,
            processing=trainer.processing_class,
        )
    if trainer.carried is not None and not resume:
        go_on(session, trainer.carried)
    if resume:
        _resume(loop, None if resume is True else str(resume))
    if trace is not None and trainer.traced is not None:
        loop.tracing = Tracing.of(trainer.traced, session, trace, course.max_steps - loop.state.global_step, trainer.folder)
    elif not resume and loop.state.is_world_process_zero:
        forget(trainer.folder)
    try:
        output = loop.run()
    except BaseException:
        if loop.checkpoints is not None:
            loop.checkpoints.settle()
        raise
    if loop.checkpoints is not None:
        loop.checkpoints.close()
    weights = {}
    if trainer.skeleton is not None:
        if dist.get_world_size() > 1:
            session.export(trainer.trained)
    elif keeps_own_objects():
        session.spread()
    else:
        weights = session.held()
    kept = None if trainer.skeleton is not None else carried(session, own_schedule=trainer.optimizers[1] is not None)
    session.close()
    return Outcome(output, loop.state, trainer.callbacks, weights, kept, loop.peaks)


def refuse_unusable(trainer: Trainer) -> None:
    """Before anything is captured or started: make once what arguments ask for, and the folder that is written to."""
    args = trainer.args
    if trainer.is_world_process_zero():
        refuse_folder("output_dir", trainer.folder)
        if not launched():  # there all ranks are told, once they have met
            folder_lock.refuse_held(trainer.folder)
    refuse_reporters(args.report_to)
    if trainer.optimizers[0] is None:
        steps = max(1, args.max_steps)
        rates_for(trainer.module, args, trainer.optimizers, trainer.optimizer_cls_and_kwargs, steps=steps)


def _agreed(trainer: Trainer, course: Course, resume: str | bool | None) -> dict[str, Any]:
    """What every rank must have been given alike, by name; under torchrun each has read its own data and arguments."""
    args, sets = trainer.args, trainer.eval_dataset
    by_name = sets if isinstance(sets, dict) else {"eval_dataset": sets}
    rows = {f"the number of rows of {name}": len(d) if has_rows(d) else None for name, d in by_name.items()}
    if course.sampler is not None:
        rows |= {"the number of rows of train_dataset": course.sampler.size, "the seed of the data": course.sampler.seed}
    steps = {name: getattr(args, name) for name in ("seed", "logging_steps", "eval_steps", "save_steps", "fp16", "bf16")}
    return {**rows, "max_steps": course.max_steps, "resume_from_checkpoint": resume, **steps}


def evaluate_on_rank(trainer: Trainer, dataset: Any, prefix: str) -> Judged:
    """Evaluate on this rank."""
    first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    session, source = _for_evaluation(trainer, first)
    watchers = watchers_for(trainer, session)
    _speaks(trainer.state, trainer)
    loop = Loop(trainer, session, source, Course(None, 0, 0), watchers, trainer.state)
    try:
        metrics = loop.evaluate(dataset, prefix)
    finally:
        watchers.close()
    session.close()
    return Judged(metrics, trainer.state, trainer.callbacks)


def predict_on_rank(trainer: Trainer, dataset: Any, prefix: str) -> PredictionOutput:
    """Predict on this rank."""
    session, _ = _for_evaluation(trainer, dataset)
    found = predict_on(trainer, session, dataset, prefix, loss_only=trainer.args.prediction_loss_only)
    session.close()
    return found


def save_on_rank(trainer: Trainer, dataset: Any, folder: Path) -> None:
    """Write this rank's part of the model."""
    session, _ = _for_evaluation(trainer, dataset)
    save(session, folder)
    session.close()


def generate_on_rank(trainer: Trainer, dataset: Any, input_ids: Tensor, options: dict[str, Any]) -> Tensor:
    """Continue rows of tokens on this rank."""
    session, _ = _for_evaluation(trainer, dataset)
    found = session.generate(input_ids, **options)
    session.close()
    return found


def _for_evaluation(trainer: Trainer, dataset: Any) -> tuple[Session, Source]:
    source = trainer.source(dataset)
    return session_for(trainer, source.example(trainer.example_rows), 1), source


def _resume(loop: Loop, folder: str | None) -> None:
    """Go on where a checkpoint stopped."""
    assert loop.checkpoints is not None
    found = loop.checkpoints.resume(folder)
    if found is None:
        raise MeshwrightError(
            f"there is no checkpoint in {loop.trainer.args.output_dir}", fix="train() without resume_from_checkpoint"
        )
    extra, data, rows = dict(found.extra or {}), dict(found.data or {}), loop.trainer.args.rows.step
    if data["rows"] % rows:
        raise MeshwrightError(
            f"{found.folder.name} stopped after {data['rows']} rows of its epoch: no whole number of steps of {rows} rows",
            fix="the batch size that it was trained with",
        )
    loop.session.rates.load_state_dict(extra["rates"])
    loop.session.steps = found.step
    fresh, kept = loop.state, extra["state"]
    for name in ("epoch", "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos"):
        setattr(fresh, name, kept[name])
    if loop.trainer.args.restore_callback_states_from_checkpoint:
        loop.watchers.restore(kept["stateful_callbacks"])
    if not loop.trainer.args.ignore_data_skip:
        loop.start = Position(data["epoch"], data["rows"] // rows)
        if loop.course.sampler is not None and loop.start.step >= loop.course.sampler.steps:
            loop.start = Position(data["epoch"] + 1, 0)


def session_for(trainer: Trainer, example: Given, steps: int, trace: Trace | None = None) -> Session:
    """The model of a trainer on this rank."""
    args = trainer.args
    count = count_for(trainer.model, own_loss=trainer.compute_loss_func is not None)
    layers, kept = cut(trainer, example)
    rates = rates_for(trainer.module, args, trainer.optimizers, trainer.optimizer_cls_and_kwargs, steps=steps)
    loss = loss_of(trainer)
    device = device_for(args.use_cpu)
    clip = args.max_grad_norm or None
    settings = SessionSettings(
        clip, loss, count, LossKind.of(args.loss_kind), seed=args.seed, precision=args.precision, device=device
    )
    module = trainer.module
    fill: Any = None if keeps_own_objects() else partial(drop_others, module, layers)
    if trainer.skeleton is not None:
        fill = partial(materialise, trainer.skeleton, layers, trainer.weights)
    session = Session(layers, args.plan, rates, settings, model=module, trace=trace, kept=kept, fill=fill)
    session.vocabularies = vocabularies(trainer.flat)
    return session


def loss_of(trainer: Trainer) -> OwnLoss | None:
    """The loss function of a trainer, where it has its own."""
    if trainer.compute_loss_func is None:
        return None
    return OwnLoss(trainer.compute_loss_func, trainer.output_name, count_for(trainer.model, own_loss=True) or items)


def check(trainer: Trainer, source: Source, example: Given) -> Evaluation:
    """Compare the captured layers of a trainer with its model; how it is evaluated is returned."""
    assert trainer.flat is not None
    plan, loss = trainer.args.plan, loss_of(trainer)
    return check_start(
        Start(
            trainer.skeleton or trainer.model,
            trainer.flat,
            example,
            stages_of(plan),
            plan.stages or None,
            loss=loss,
            count=None if loss is None else loss.count,
            loss_kind=LossKind.of(trainer.args.loss_kind),
            microbatches=plan.microbatches * plan.dp,
            more=source.example(max(trainer.example_rows, ROWS)),
            precision=trainer.args.precision,
            weights=trainer.weights,
        )
    )


def cut(trainer: Trainer, example: Given) -> tuple[Layers, tuple[Kept, ...] | None]:
    """The model of a trainer as layers, and what its stages keep of one microbatch where recompute is chosen by a budget."""
    plan, own = trainer.args.plan, trainer.compute_loss_func is not None
    if trainer.skeleton is not None:
        ground(trainer.skeleton, trainer.weights)
    cuts, graph = plan.stages or None, trainer.evaluation.graph
    layers = layers_for(trainer.model, example, stages_of(plan), cuts=cuts, flat=trainer.flat, own_loss=own, evaluated=graph)
    if plan.budget_bytes is None:
        return layers, None
    loss = loss_of(trainer)
    batch = Batch(example, microbatches=1, names=layers.columns)
    objective = Objective(loss, weigh=layers.weigh)
    return layers, saved_bytes(layers, batch, objective=objective, precision=trainer.args.precision)


def watchers_for(trainer: Trainer, session: Session) -> Watchers:
    """The callbacks of a run."""
    return Watchers(
        trainer.callbacks,
        list(trainer.args.report_to or ()),
        bar=not trainer.args.disable_tqdm,
        folder=trainer.folder / trainer.runs,
        model=trainer.model,
        processing_class=trainer.processing_class,
        optimizer=session.rates.reference,
        lr_scheduler=session.rates.scheduler,
    )


def new_state(trainer: Trainer, course: Course) -> TrainerState:
    """The state at the first step."""
    state: Any = TrainerState(max_steps=course.max_steps, num_train_epochs=course.epochs)
    state.compute_steps(trainer.args, course.max_steps)
    state.train_batch_size = trainer.args.train_batch_size
    _speaks(state, trainer)
    return state


def _speaks(state: TrainerState, trainer: Trainer) -> None:
    """Tell callbacks whether this rank logs for all; the state may come from another rank."""
    state.is_world_process_zero = dist.get_rank() == 0
    state.is_local_process_zero = trainer.args.local_process_index == 0
