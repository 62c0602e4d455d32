"""The inputs of a layer besides the outputs of the layer before it, and the outputs that are allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter as Argument
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.runtime.stage.layers import columns_of


class Takes(NamedTuple):
    """The inputs that a layer declares besides the outputs of the layer before it.

    `shares`: it takes values that other layers of its stage have created.
    """

    columns: tuple[str, ...]
    inplace: bool
    shares: bool

    @classmethod
    def of(cls, layer: nn.Module) -> Takes | None:
        """Returns what a layer takes, or None if it takes nothing else.

        Called once per layer, because looking up a missing attribute of a module is slow.
        """
        found = cls(columns_of(layer), bool(getattr(layer, "inplace", False)), bool(getattr(layer, "takes_made_again", False)))
        return found if found.columns or found.shares else None

    def from_batch(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns columns of the batch by name. A layer that changes tensors in place gets copies."""
        found = {name: columns[name] for name in self.columns}
        return {name: t.clone() for name, t in found.items()} if self.inplace else found


def tensors_of(output: Any, layer: int) -> tuple[Tensor, ...]:
    """Returns the output of a layer as a tuple of tensors for the next one."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return (loss,)
    if isinstance(output, tuple | list) and output and all(isinstance(t, Tensor) for t in output):
        return tuple(output)
    raise MeshwrightError(
        f"layer {layer} returned {type(output).__name__}, but stages exchange a tensor or a tuple of tensors",
        fix="return tensors, or merge this layer with the next one",
    )


def takes_target(layer: nn.Module) -> Callable[[int], bool]:
    """Returns a function that tells whether a last layer computes the loss itself, for the number of values that it is given.

    It does if its next argument has the name of a target, or if it needs one more argument than it is given.
    """
    forward: Callable[..., Any] = layer.forward
    arguments = [a for a in signature(forward).parameters.values() if a.kind is Argument.POSITIONAL_OR_KEYWORD]
    needed = sum(a.default is Argument.empty for a in arguments)
    names = [a.name for a in arguments]
    return lambda given: (names[given : given + 1] != [] and names[given] in TARGETS) or needed == given + 1


def changes_in_place(layers: Sequence[nn.Module]) -> bool:
    """Returns whether one of these layers may change its inputs."""
    return any(getattr(m, "inplace", False) for at in layers for m in at.modules())


def gradients_of(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Returns the gradients of the tensors that take one; zeros if the backward did not reach a tensor."""
    found = []
    for tensor in tensors:
        if tensor.requires_grad:
            gradient = tensor.grad
            found.append(torch.zeros_like(tensor) if gradient is None else gradient.contiguous())
    return tuple(found)
