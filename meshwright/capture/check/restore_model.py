"""Restores a model after a check has run it: buffers, gradients, modes, attributes, hooks and random states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.check.random_streams import keep_states
from meshwright.capture.trace.patches.kept_attributes import HOOKS

PLAIN = (bool, int, float, complex, str, tuple, type(None))
"""Attributes of these types are compared: if a forward changes one, the next call behaves differently."""


@contextmanager
def untouched(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Restore a model and its captured layers at the end, also after an error."""
    modules = list(dict.fromkeys(module for root in (model, *layers) for module in root.modules()))
    modes = [module.training for module in modules]
    held = {module: dict(vars(module)) for module in model.modules()}
    inside = [(value, copy(value)) for kept in held.values() for key, value in kept.items() if _is_container(key, value)]
    inside += [(kept[name], copy(kept[name])) for kept in held.values() for name in HOOKS]
    owned = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    values = [(b, b.detach().clone()) for b in dict.fromkeys((*model.buffers(), *_buffers(layers))) if not b.is_meta]
    gradients = {p: p.grad for p in model.parameters()}
    restore = keep_states()
    try:
        yield
    finally:
        restore()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, kept in held.items():
            for name in [name for name in vars(module) if name not in kept]:
                del vars(module)[name]
            vars(module).update(kept)
        for container, before in inside:
            _refill(container, before)
        for module, buffers in owned:
            for name, buffer in buffers.items():
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
        put_back(values)
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def put_back(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Restore the saved values of tensors."""
    with torch.no_grad():
        for tensor, kept in values:
            if not torch.equal(tensor, kept):
                tensor.copy_(kept)


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return numbers and strings that modules have as attributes, by path. `training` is left out."""
    found = {}
    for path, module in model.named_modules():
        owner = path or type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, PLAIN) and name != "training":
                found[f"{owner}.{name}"] = value
    return found


def _buffers(layers: Iterable[nn.Module]) -> Iterator[Tensor]:
    for layer in layers:
        yield from layer.buffers()


def _is_container(name: str, value: Any) -> bool:
    """True for a list, dict or set of the user. Names of torch's own begin with an underscore."""
    return type(value) in (list, dict, set) and not name.startswith("_")


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)
