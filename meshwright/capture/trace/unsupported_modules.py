"""Finds modules that cannot be cut or trained as they are, before anything else is done with them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from meshwright.errors import MeshwrightError


def require_ready(modules: Iterable[nn.Module]) -> None:
    """Raise for parameters without a shape, and for modules that torch.jit compiled."""
    for root in modules:
        for name, module in root.named_modules():
            called = f"{type(module).__name__} {name}".strip()
            if isinstance(module, torch.jit.ScriptModule):
                raise MeshwrightError(f"{called} is compiled by torch.jit", fix="pass the original module, before torch.jit")
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(isinstance(t, UninitializedParameter | UninitializedBuffer) for t in own):
                raise MeshwrightError(f"{called} does not know its shapes yet", fix="run the model once on a batch")
