"""From one `train()` to the next of the same trainer, as in Hugging Face's: the optimizer keeps what it has gathered.

Weights go on by themselves. Learning rates start anew, unless the schedule is the user's own; steps and epochs count from 0.
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
from meshwright.train.checkpoint.run_state import parameters, shared_out
from meshwright.train.optimizer.optimizer_facts import entries, facts, merged, put_back
from meshwright.train.session.session import Session
from meshwright.train.setup.where import keeps_own_objects


@dataclass(frozen=True)
class Carried:
    """What a rank's optimizers keep, by the names of parameters; `rates` where the schedule is the user's own."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]
    rates: Mapping[str, Any] | None
    scale: Mapping[str, float] | None
    plan: Parallel


def carried(session: Session, *, own_schedule: bool) -> Carried:
    """What this rank has at the end of training: all that it holds, or its share where a parent gathers the shares."""
    mine = None if keeps_own_objects() else shared_out(session.engine)
    found: dict[str, dict[str, Tensor]] = {}
    for name, entry, value in entries(session.engine):
        if isinstance(value, Tensor) and value.dim() and (mine is None or name in mine):
            found.setdefault(name, {})[entry] = value.detach()
    rates = session.rates.state_dict() if own_schedule else None
    return Carried(found, facts(session.engine), rates, session.scale, session.parallel)


def gathered(parts: Sequence[Carried | None]) -> Carried | None:
    """The shares of all ranks together."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    tensors = {name: kept for part in found for name, kept in part.tensors.items()}
    return replace(found[0], tensors=tensors, facts=merged([dict(part.facts) for part in found]))


def go_on(session: Session, kept: Carried) -> None:
    """Let the optimizers of a new session have what those of the last one had."""
    held = parameters(session.engine)
    if keeps_own_objects() and session.parallel != kept.plan:
        raise MeshwrightError(
            "the plan has changed since this trainer trained, and each rank has kept the optimizer of its own stages",
            fix="train(resume_from_checkpoint=True), which any plan can, or a new Trainer",
        )
    tensors = {
        name: {entry: t.to(held[name].device, copy=True) for entry, t in of.items()}
        for name, of in kept.tensors.items()
        if name in held
    }
    put_back(session.engine, kept.facts, tensors)
    if kept.rates is not None:
        session.rates.load_state_dict(kept.rates)
    session.rescale(kept.scale)


def bring_back(module: nn.Module, weights: Iterable[Mapping[str, Tensor]]) -> None:
    """Let trained weights come back from ranks that are other processes."""
    held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    with torch.no_grad():
        for part in weights:
            for name, tensor in part.items():
                held[name].copy_(tensor)


def take_notes(mine: list[TrainerCallback], theirs: list[TrainerCallback]) -> None:
    """Let callbacks have what they have noted on rank 0, where that is another process."""
    if mine is not theirs:
        for callback, noted in zip(mine, theirs, strict=True):
            callback.__dict__.update(noted.__dict__)
