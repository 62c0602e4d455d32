"""Refuses what a user's optimizer would lose. Each unit of a plan gets a new optimizer of the same class, groups and options.

hooks (`register_step_pre_hook`, `register_step_post_hook`)     the optimizers of the units would not call them
state (an optimizer that has taken steps)                       the optimizers of the units start without it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.torch_internals import step_hooks


def refuse_used(optimizer: torch.optim.Optimizer) -> None:
    """Raises if an optimizer has step hooks, or state from steps that it has taken."""
    name = type(optimizer).__name__
    if step_hooks(optimizer):
        raise MeshwrightError(
            f"{name} has step hooks (register_step_pre_hook or register_step_post_hook), which would not be called: each stage "
            "has an optimizer of its own",
            fix=f"a subclass of {name} whose step() does what the hook does, or hooks on the gradients of parameters",
        )
    if optimizer.state and not _is_new(optimizer):
        raise MeshwrightError(
            f"{name} has state of {len(optimizer.state)} parameters from steps that it has taken, which would be lost: each "
            "stage starts with an optimizer of its own",
            fix="a new optimizer, or take those steps in a session too and pass its state_dict() to load_state_dict()",
        )


def _is_new(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the state is what the constructor makes."""
    return all(is_initial_state(optimizer, p) for p in optimizer.state)


def is_initial_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Returns whether a parameter has no state, or what the constructor makes: zeros, or in Adagrad a value of its options."""
    options = [value for group in optimizer.param_groups for value in group.values() if type(value) in (float, int)]
    return all(_is_start(value, options) for value in optimizer.state.get(parameter, {}).values())


def _is_start(value: Any, options: list[float]) -> bool:
    if isinstance(value, Tensor):
        return not value.numel() or any(bool((value == start).all()) for start in (0.0, *options))
    return not value or value in options
