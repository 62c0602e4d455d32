"""Submodules that a user has put into evaluation stay there while the rest of the model trains.

    model.train()
    model.norm.eval()                      a frozen batch norm
    undo = stay_in_evaluation(model)       from now on model.train() leaves it as it is
    undo()

A model that is in evaluation as a whole, as `from_pretrained` returns it, says nothing about its parts: all of it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def stay_in_evaluation(model: Any) -> Callable[[], None]:
    """Let parts that are in evaluation keep their modes when a module, or every layer of a list, trains; returns the undo."""
    layers: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
    kept = _evaluated(layers) if any(layer.training for layer in layers) else []
    for module in kept:
        module.train = partial(_stay, [(part, part.training) for part in module.modules()])  # type: ignore[method-assign]
    return partial(_undo, kept)


def _evaluated(layers: list[nn.Module]) -> list[nn.Module]:
    """The outermost modules that are in evaluation, and would not be after `train()`; all modes are afterwards as before."""
    modes = {module: module.training for layer in layers for module in layer.modules()}
    for layer in layers:
        layer.train()
    turned = {module for module, was in modes.items() if module.training and not was}
    for module, was in modes.items():
        module.training = was
    inner = {part for module in turned for part in module.modules() if part is not module}
    return [module for module in modes if module in turned - inner]


def _stay(modes: list[tuple[nn.Module, bool]], mode: bool = True) -> nn.Module:
    """`train()` of a module that keeps its modes; in evaluation all of it is."""
    for module, was in modes:
        module.training = was and mode
    return modes[0][0]


def _undo(kept: list[nn.Module]) -> None:
    for module in kept:
        vars(module).pop("train", None)
