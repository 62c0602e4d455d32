"""Restores the weights of a model that writes into them in evaluation, as RWKV does when it rescales them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.torch_internals import DispatchMode, written_arguments


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Restore weights and module attributes at the end. Yields the old values of the weights that were written."""
    seen = _Writes(model)
    held = {module: dict(vars(module)) for module in model.modules()}
    try:
        with seen:
            yield seen.kept
    finally:
        if seen.kept:
            for name, values in seen.kept.items():
                seen.parameters[name].data.copy_(values)  # not recorded by autograd, because a backward may still follow
            for module, before in held.items():
                vars(module).update(before)


class _Writes(DispatchMode):
    """Copies each parameter before it is written into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = dict(model.named_parameters())
        self.names: dict[int, str] = {_place(p): name for name, p in self.parameters.items() if not p.is_meta}
        self.kept: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for written in written_arguments(func, args, kwargs):
            self._keep(written)
        return func(*args, **kwargs)

    def _keep(self, written: Any) -> None:
        for tensor in written if isinstance(written, list | tuple) else (written,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta:
                name = self.names.get(_place(tensor))
                if name is not None and name not in self.kept:
                    self.kept[name] = self.parameters[name].detach().clone()


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which views share. Tensors of a trace have none (-1)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return -1
