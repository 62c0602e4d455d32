"""Keep the optimizer state between two `train()` calls of one trainer, as the Hugging Face Trainer does.

The weights stay in the model. Learning rates start again from the beginning, unless the user passed a learning-rate schedule.
Steps and epochs are counted from 0 again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.train.checkpoint.run_state import optimizer_tensors, parameters, state_part
from meshwright.train.optimizer.optimizer_facts import entries, facts, merged, put_back
from meshwright.train.session.session import Session
from meshwright.train.setup.where import keeps_own_objects


@dataclass(frozen=True)
class KeptOptimizerState:
    """The state of a rank's optimizers, by parameter name. `rates` is set only if the user passed the schedule."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]
    rates: Mapping[str, Any] | None
    scale: Mapping[str, float] | None
    plan: Parallel


def kept_optimizer_state(session: Session, *, own_schedule: bool) -> KeptOptimizerState:
    """Returns the optimizer state of this rank after training.

    If a parent process merges the states of all ranks, each rank returns whole tensors, of the parameters that it writes.
    Otherwise it keeps what it holds.
    """
    engine = session.engine
    held = {(name, entry): v for name, entry, v in entries(engine) if isinstance(v, Tensor) and v.dim()}
    found: dict[str, dict[str, Tensor]] = {}
    for (name, entry), value in (held if keeps_own_objects() else optimizer_tensors(engine)).items():
        found.setdefault(name, {})[entry] = value.detach()
    rates = session.rates.state_dict() if own_schedule else None
    return KeptOptimizerState(found, facts(session.engine), rates, session.scale, session.parallel)


def merged_optimizer_state(parts: Sequence[KeptOptimizerState | None]) -> KeptOptimizerState | None:
    """Merges the states that the ranks returned. Returns None if no rank returned one."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    tensors = {name: kept for part in found for name, kept in part.tensors.items()}
    return replace(found[0], tensors=tensors, facts=merged([dict(part.facts) for part in found]))


def restore_optimizer_state(session: Session, kept: KeptOptimizerState) -> None:
    """Loads the optimizer state of the last session into the optimizers of a new session."""
    held = parameters(session.engine)
    if keeps_own_objects() and session.parallel != kept.plan:
        raise MeshwrightError(
            "the plan changed after the last train(), and each rank has only the optimizer state of its own stages",
            fix="train(resume_from_checkpoint=True), which works with any plan, or a new Trainer",
        )
    tensors = {
        name: {entry: state_part(session.engine, held[name], t).to(held[name].device, copy=True) for entry, t in of.items()}
        for name, of in kept.tensors.items()
        if name in held
    }
    put_back(session.engine, kept.facts, tensors)
    if kept.rates is not None:
        session.rates.load_state_dict(kept.rates)
    session.load_scale(kept.scale)


def copy_trained_weights(module: nn.Module, weights: Iterable[Mapping[str, Tensor]]) -> None:
    """Copies the trained weights that the ranks returned into the model of this process."""
    held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    with torch.no_grad():
        for part in weights:
            for name, tensor in part.items():
                held[name].copy_(tensor)


def copy_callback_attributes(mine: list[TrainerCallback], theirs: list[TrainerCallback]) -> None:
    """Copies the attributes of rank 0's callbacks to the callbacks here, if rank 0 is another process."""
    if mine is not theirs:
        for callback, other in zip(mine, theirs, strict=True):
            callback.__dict__.update(other.__dict__)
