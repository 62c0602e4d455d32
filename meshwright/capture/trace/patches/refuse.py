"""Refuses what a trace would silently drop: gradient hooks, and backward calls inside a forward.

Reentrant checkpoints are unwrapped: they run their part without building a graph, and the plan decides about recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from meshwright.capture.trace.patches.replaced_attribute import replaced
from meshwright.capture.trace.patches.user_lines import asking
from meshwright.errors import MeshwrightError
from meshwright.torch_internals import backward_hooks

_DROPPED = (
    (Tensor, "register_hook", "a gradient hook"),
    (Tensor, "register_post_accumulate_grad_hook", "a gradient hook"),
    (Tensor, "backward", "a backward"),
    (torch.autograd, "backward", "a backward"),
    (torch.autograd, "grad", "a backward"),
)


@contextmanager
def nothing_dropped(model: nn.Module) -> Iterator[None]:
    """While a model is traced, raise for anything that a graph cannot hold, with the line of the model that uses it."""
    refuse_backward_hooks(model)
    with ExitStack() as stack:
        for owner, name, what in _DROPPED:
            stack.enter_context(replaced(owner, name, _refusing(name, what)))
        stack.enter_context(replaced(torch.utils.checkpoint.CheckpointFunction, "apply", _unwrapped))
        yield
    refuse_backward_hooks(model)


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise if a module has a backward hook. The captured layers would not call it."""
    for name, module in model.named_modules():
        if backward_hooks(module):
            raise MeshwrightError(
                f"{name or type(model).__name__} has a backward hook, which would not be called: its layers are captured",
                fix="remove the backward hook, use a forward hook, or pass a list of layers, which is not captured",
            )


def _unwrapped(run: Any, preserve: bool, *arguments: Any) -> Any:
    return run(*arguments)


def _refusing(name: str, what: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise MeshwrightError(
            f"the forward uses {what} ({name}) at {asking()}, which a captured graph drops",
            fix="use an autograd.Function with its own backward, or pass a list of layers, which is not captured",
        )

    return refuse
