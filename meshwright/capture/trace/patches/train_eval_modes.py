"""Handles modules that behave differently in training and evaluation without an operation that has a switch for it.

A trace follows one mode. Layers that drop whole rows at random, or add noise, read `self.training` and draw random numbers
themselves. While a model is traced, such a module runs in both modes, and one operation selects between the two results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.trace.patches.random_rates import Never

MODE = "meshwright.mode"


@torch.library.custom_op("meshwright::mode", mutates_args=())
def mode(trained: Tensor, evaluated: Tensor) -> Tensor:
    """Placeholder for `Chosen` in a trace; a captured graph never runs it."""
    return trained.clone()


@mode.register_fake
def _(trained: Tensor, evaluated: Tensor) -> Tensor:
    return torch.empty_like(trained)


@contextmanager
def both_modes(model: nn.Module, dropped: Callable[[object], None] = lambda drawn: None) -> Iterator[None]:
    """While a model is traced, run modules that read their mode in both modes, and keep layers whose drop rate is 0.

    `dropped` is called with each number that was drawn to decide whether a layer is dropped.
    """
    chosen = [module for module in model.modules() if _has_modes(module)]
    rates = [module for module in model.modules() if type(getattr(module, "layerdrop", None)) in (int, float)]
    never = [module for module in rates if module.layerdrop == 0]
    kept = {module: module.layerdrop for module in never}
    try:
        for module in chosen:
            module.forward = partial(_in_both, module, type(module).forward)
        for module in never:
            module.layerdrop = Never(dropped)  # type: ignore[assignment]
        yield
    finally:
        for module in chosen:
            del module.forward
        for module, rate in kept.items():
            module.layerdrop = rate


def _has_modes(module: nn.Module) -> bool:
    """True for a user's module without state and children whose forward reads `self.training`."""
    own = type(module).__module__.partition(".")[0] != "torch" and "forward" not in vars(module)
    state = (
        next(module.children(), None) or next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
    )
    code = getattr(type(module).forward, "__code__", None)
    return own and not state and code is not None and "training" in code.co_names


def _in_both(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not module.training:
        return forward(module, *args, **kwargs)
    module.training = False
    try:
        evaluated = forward(module, *args, **kwargs)
    finally:
        module.training = True
    trained = forward(module, *args, **kwargs)
    same = isinstance(trained, Tensor) and isinstance(evaluated, Tensor) and trained is not evaluated
    return mode(trained, evaluated) if same and trained.shape == evaluated.shape else trained
