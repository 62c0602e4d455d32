"""Replaces meta tensors during tracing, so that a model on the meta device looks like the model that will run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def standing(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Replace meta tensors by tensors without storage on a device (default: CPU) during tracing. They cannot be computed with."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    blank = {name: tensor for name, tensor in every if tensor.is_meta}
    others = {id(tensor): _hollow(tensor, device or torch.device("cpu")) for tensor in blank.values()}
    with replaced(model, blank, {name: others[id(tensor)] for name, tensor in blank.items()}):
        yield


@contextmanager
def replaced(model: nn.Module, before: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers by others for a while. `before` are those that come back."""
    _set(model, tensors)
    try:
        yield
    finally:
        _set(model, before)


def _set(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, tensor)


def _hollow(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor with the same shape and strides on a device. Its storage is released at once."""
    found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    found.untyped_storage().resize_(0)
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
