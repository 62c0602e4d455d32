"""Modules that are imported before local workers are forked: torch, the engine, and what a first optimizer step imports."""

import torch

import meshwright.runtime.emulate.emulate
import meshwright.runtime.engine.engine

_weight = torch.nn.Parameter(torch.zeros(1))
_weight.grad = torch.zeros(1)
torch.optim.SGD([_weight]).step()

__all__ = ["meshwright"]
