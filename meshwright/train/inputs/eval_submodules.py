"""Keeps submodules that the user set to eval mode in that mode while the rest of the model trains.

    model.train()
    model.norm.eval()                      a frozen batch norm
    undo = stay_in_evaluation(model)       from now on model.train() does not change it
    undo()

If the whole model is in eval mode, as `from_pretrained` returns it, the user did not choose it: all of the model trains.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def stay_in_evaluation(model: Any) -> Callable[[], None]:
    """Makes `train()` keep submodules in eval mode that are in eval mode now. Returns a function that undoes this.

    `model` is a module or a list of layers.
    """
    layers: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
    kept = _evaluated(layers) if any(layer.training for layer in layers) else []
    for module in kept:
        module.train = partial(_stay, [(part, part.training) for part in module.modules()])  # type: ignore[method-assign]
    return partial(_undo, kept)


def _evaluated(layers: list[nn.Module]) -> list[nn.Module]:
    """Returns the outermost modules in eval mode that `train()` would set to train mode. All modes are restored."""
    modes = {module: module.training for layer in layers for module in layer.modules()}
    for layer in layers:
        layer.train()
    turned = {module for module, was in modes.items() if module.training and not was}
    for module, was in modes.items():
        module.training = was
    inner = {part for module in turned for part in module.modules() if part is not module}
    return [module for module in modes if module in turned - inner]


def _stay(modes: list[tuple[nn.Module, bool]], mode: bool = True) -> nn.Module:
    """Replaces `train()` of a module: `train()` restores the kept modes, `eval()` sets all of the module to eval mode."""
    for module, was in modes:
        module.training = was and mode
    return modes[0][0]


def _undo(kept: list[nn.Module]) -> None:
    for module in kept:
        vars(module).pop("train", None)
