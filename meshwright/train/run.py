"""What every rank does when a trainer trains: read, cut, put together, train, and bring back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import TrainerState, set_seed

from meshwright.runtime.batch import Given
from meshwright.train.callbacks import Watchers
from meshwright.train.cut import layers_for
from meshwright.train.loop import Course, Loop, Outcome
from meshwright.train.optimizers import rates_for
from meshwright.train.place import alone, device_for
from meshwright.train.session import Session, SessionSettings

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer


def train_on_rank(trainer: Trainer, resume: str | bool | None) -> Outcome:
    """Train on this rank; all ranks call this together."""
    set_seed(trainer.args.seed)
    source = trainer.source(trainer.train_dataset)
    course = Course.of(trainer.args, source)
    session = session_for(trainer, source.example(_example_rows(trainer)), course.max_steps)
    mesh = session.engine.mesh
    source = replace(source, copy=mesh.copy, copies=mesh.copies, needed=session.columns)
    state = new_state(trainer, course)
    loop = Loop(trainer, session, source, course, watchers_for(trainer, session), state)
    output = loop.run()
    weights = {}
    if alone():
        session.spread()
    else:
        weights = session.held()
    session.close()
    return Outcome(output, loop.state, trainer.callbacks, weights)


def session_for(trainer: Trainer, example: Given, steps: int) -> Session:
    """The model of a trainer on this rank."""
    args = trainer.args
    layers = layers_for(trainer.model, example, args.plan)
    rates = rates_for(trainer.module, args, trainer.optimizers, trainer.optimizer_cls_and_kwargs, steps=steps)
    settings = SessionSettings(clip=args.max_grad_norm or None, seed=args.seed, device=device_for(args.use_cpu))
    return Session(layers, args.plan, rates, settings, model=trainer.module)


def watchers_for(trainer: Trainer, session: Session) -> Watchers:
    """The callbacks of a run."""
    return Watchers(
        trainer.callbacks,
        trainer.args.report_to,
        bar=not trainer.args.disable_tqdm,
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
    state.is_world_process_zero = dist.get_rank() == 0
    state.is_local_process_zero = trainer.args.local_process_index == 0
    return state


def _example_rows(trainer: Trainer) -> int:
    """Enough rows that none of their number is taken for a constant."""
    args = trainer.args
    return max(2, args.rows.device * args.rows.accumulation // args.plan.microbatches)
