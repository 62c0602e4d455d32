"""Refuses gradient hooks of parameters (`register_hook`, `register_post_accumulate_grad_hook`) that would be lost.

a model that is sent to local workers     pickling drops hooks
a sketch                                  its parameters get new storage when they are filled, and torch then drops hooks

In one process and under torchrun a model with weights keeps its hooks. The engine refuses hooks that its schedule cannot call.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.torch_internals import gradient_hooks
from meshwright.train.setup.where import launched


def refuse_lost_hooks(model: nn.Module, ranks: int, *, sketched: bool) -> None:
    """Raises if a parameter has a hook that training on `ranks` ranks would lose. `sketched`: the model has no values yet."""
    is_sent = ranks > 1 and not launched() and not dist.is_initialized()
    if not (sketched or is_sent):
        return
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter):
            why = "a parameter of a sketch loses it when it is filled" if sketched else "it cannot be sent to local workers"
            stays = "a model with its weights (model=)" if sketched else f"torchrun --nproc-per-node {ranks}"
            raise MeshwrightError(
                f"{name} has a gradient hook, which would not be called: {why}",
                fix=f"{stays}, where hooks stay, or an optimizer whose step() does what the hook does",
            )
