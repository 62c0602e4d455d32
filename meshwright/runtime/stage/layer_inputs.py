"""What a layer takes beside the values that cross to it, and what it may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter as Argument
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.runtime.stage.layers import columns_of


class Takes(NamedTuple):
    """What a layer says it takes beside the values that cross to it; `shares`: what other layers of its stage have made."""

    columns: tuple[str, ...]
    inplace: bool
    shares: bool

    @classmethod
    def of(cls, layer: nn.Module) -> Takes | None:
        """Asked once, for a module answers slowly for what it does not have; None where it takes nothing beside."""
        found = cls(columns_of(layer), bool(getattr(layer, "inplace", False)), bool(getattr(layer, "takes_made_again", False)))
        return found if found.columns or found.shares else None

    def from_batch(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns of the batch by name; a layer that changes tensors in place gets copies."""
        found = {name: columns[name] for name in self.columns}
        return {name: t.clone() for name, t in found.items()} if self.inplace else found


def tensors_of(output: Any, layer: int) -> tuple[Tensor, ...]:
    """What a layer returned, as the next one takes it."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return (loss,)
    if isinstance(output, tuple | list) and output and all(isinstance(t, Tensor) for t in output):
        return tuple(output)
    raise MeshwrightError(
        f"layer {layer} returned {type(output).__name__}; what crosses stages is a tensor or a tuple of tensors",
        fix="return tensors, or put this layer and the next into one",
    )


def takes_target(layer: nn.Module) -> Callable[[int], bool]:
    """Does a last layer compute the loss itself? Asked with how many values it is given.

    It does where its next argument is named as targets are, or where it needs one more than is given.
    """
    forward: Callable[..., Any] = layer.forward
    arguments = [a for a in signature(forward).parameters.values() if a.kind is Argument.POSITIONAL_OR_KEYWORD]
    needed = sum(a.default is Argument.empty for a in arguments)
    names = [a.name for a in arguments]
    return lambda given: (names[given : given + 1] != [] and names[given] in TARGETS) or needed == given + 1
