"""Replaces meta tensors during tracing, so that a model on the meta device looks like the model that will run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def standing(model: nn.Module) -> Iterator[None]:
    """Replaces meta tensors by CPU tensors without storage during tracing. They cannot be computed with."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    blank = {name: tensor for name, tensor in every if tensor.is_meta}
    others = {id(tensor): _hollow(tensor) for tensor in blank.values()}
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


def _hollow(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the same shape and strides on the CPU. Its storage is released at once."""
    found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    found.untyped_storage().resize_(0)
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
