"""Checks the arguments of `parallelize` and `verify` before anything uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.capture.weights.sketch import Skeleton
from meshwright.errors import MeshwrightError

SEEDS = 1 << 63
"""Seeds must be below this number: larger ones do not fit into torch's generators."""


def refuse_arguments(model: Any, optimizer: Any, scheduler: Any, loss: Any, seed: Any) -> None:
    """Checks the arguments of `parallelize`."""
    refuse_model(model)
    refuse_optimizer(optimizer, scheduler)
    refuse_loss(loss)
    refuse_seed(seed)


def refuse_seed(seed: Any) -> None:
    """Refuses a seed that torch's generators do not accept."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise MeshwrightError(f"a seed must be a whole number of at least 0 and below 2**63, got {seed!r}", fix="seed=0")


def refuse_loss(loss: Any) -> None:
    """Refuses a loss that cannot be called."""
    if loss is not None and not callable(loss):
        raise MeshwrightError(f"loss must be a function of output and target, got {loss!r}", fix="loss=mse_loss")


def refuse_model(model: Any) -> None:
    """Refuses an object that is not a model."""
    listed = isinstance(model, Sequence | nn.ModuleList) and len(model) > 0 and all(isinstance(m, nn.Module) for m in model)
    if not listed and not isinstance(model, nn.Module | Skeleton):
        raise MeshwrightError(
            f"a model must be a module, a list of layers or a sketch, got {repr(model)[:80]}",
            fix="a torch.nn.Module with its weights",
        )


def refuse_optimizer(optimizer: Any, scheduler: Any) -> None:
    """Refuses an optimizer or a learning-rate schedule that is neither an object of its class nor a function."""
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise MeshwrightError(
            f"optimizer must be a torch.optim.Optimizer or a function that returns one, got {optimizer!r}",
            fix="torch.optim.AdamW",
        )
    if scheduler is not None and not callable(scheduler) and not hasattr(scheduler, "state_dict"):
        raise MeshwrightError(
            f"scheduler must be a learning-rate schedule or a function that returns one, got {scheduler!r}", fix="scheduler=None"
        )
