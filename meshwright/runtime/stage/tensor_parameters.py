"""What a rank of a tensor-parallel box must know about its parameters to sum gradients and to compute norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.costs.scheme import Axes
from meshwright.tensor.wires import Wires


@dataclass(frozen=True)
class TensorParameters:
    """The parameters of a sharded model on one rank."""

    wires: Wires
    unsummed: Mapping[nn.Parameter, Axes]
    """The axes over which the gradient of a parameter is a part of a sum. They are summed once per step."""
    counted: Mapping[nn.Parameter, bool]
    """Whether this rank counts a parameter in the norm of all gradients. Of ranks with equal parts, one does."""

    def sum_parts(self, params: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Sums gradients over the axes on which they are parts, in place. All ranks of the box call this together."""
        by_axes: dict[tuple[Axes, torch.dtype], list[Tensor]] = {}
        for parameter, gradient in zip(params, gradients, strict=True):
            if axes := self.unsummed.get(parameter, ()):
                by_axes.setdefault((axes, gradient.dtype), []).append(gradient)
        for (axes, _), parts in sorted(by_axes.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            joined = torch.cat([part.reshape(-1) for part in parts])
            whole = self.wires.total(joined, axes)
            for part, found in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
                part.copy_(found.view_as(part))
