"""The parameters of a rank of a tensor-parallel box: its shards, and how they become sums, norms and whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.costs.declared import Phase
from meshwright.costs.scheme import Axes
from meshwright.tensor.wires.group_wires import GroupWires
from meshwright.tensor.wires.wires import Wires


class CutRule(Protocol):
    """How a parameter is cut over the ranks of a box. Tensors of the same shape (optimizer state) are cut in the same way."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of a part."""

    def part(self, whole: Tensor, coordinate: int) -> Tensor:
        """Returns the part of a whole tensor at a coordinate."""

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor from the parts of all coordinates, in order."""


@dataclass(frozen=True)
class TensorParameters:
    """The parameters of a sharded model on one rank."""

    wires: Wires
    unsummed: Mapping[nn.Parameter, Axes]
    """The axes over which the gradient of a parameter is a partial sum. It is summed once per step."""
    counted: Mapping[nn.Parameter, bool]
    """Whether this rank counts a parameter in the norm of all gradients. Of ranks with equal parts, one does."""
    cuts: Mapping[nn.Parameter, CutRule]
    sync_words: Mapping[nn.Parameter, Fraction]
    """The words that a rank is declared to send to sum the gradient of a parameter."""

    def sum_parts(self, params: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Sums gradients over the axes on which they are partial sums, in place. All ranks of the box must call this."""
        log = self.wires.log
        log.phase = Phase.SYNC
        log.declare({Phase.SYNC: sum((self.sync_words[parameter] for parameter in params), Fraction(0))})
        by_axes: dict[tuple[Axes, torch.dtype], list[Tensor]] = {}
        for parameter, gradient in zip(params, gradients, strict=True):
            if axes := self.unsummed.get(parameter, ()):
                by_axes.setdefault((axes, gradient.dtype), []).append(gradient)
        for (axes, _), parts in sorted(by_axes.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            joined = torch.cat([part.reshape(-1) for part in parts])
            whole = self.wires.total(joined, axes)
            for part, found in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
                part.copy_(found.view_as(part))

    def take_parts(self, params: Iterable[nn.Parameter], device: torch.device) -> None:
        """Replaces whole parameters by this rank's parts. All ranks of the box call this together.

        Ranks may have built their models from different seeds, so coordinate 0 first sends its values to the others. A parameter
        that was filled as a shard is not changed.
        """
        for parameter in params:
            cut = self.cuts[parameter]
            if tuple(parameter.shape) == cut.shape:
                whole = parameter.detach().to(device).contiguous()  # strides may differ between ranks
                dist.broadcast(whole, group_src=0, group=self._box)
                _replace(parameter, cut.part(whole, self.wires.rank).clone())

    def restore_wholes(self, params: Iterable[nn.Parameter]) -> None:
        """Replaces this rank's parts by whole parameters. All ranks of the box call this together, after training."""
        for parameter in params:
            whole = self.whole(parameter, parameter)
            assert whole is not None, "every rank of the box gets it"
            _replace(parameter, whole)

    def is_cut(self, parameter: nn.Parameter, shape: Sequence[int]) -> bool:
        """Returns whether a saved tensor of this shape belongs to a parameter of which this rank holds only a part."""
        return tuple(shape) == self.cuts[parameter].shape != tuple(parameter.shape)

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Returns this rank's part of a tensor that has the shape of a whole parameter."""
        return self.cuts[parameter].part(whole, self.wires.rank)

    def whole(self, parameter: nn.Parameter, part: Tensor, *, to: int | None = None) -> Tensor | None:
        """Returns a whole tensor from the parts of the box: at coordinate `to`, or on all its ranks if `to` is None.

        `part` has the shape of this rank's part of the parameter. All ranks of the box call this together.
        """
        here, cut = self.wires.rank, self.cuts[parameter]
        part = part.detach().contiguous()
        if tuple(part.shape) == cut.shape:  # it is not cut: all ranks have the same
            return part if to in (None, here) else None
        parts = [torch.empty_like(part) for _ in range(self.wires.grid.ranks)] if to in (None, here) else None
        if to is None:
            dist.all_gather(parts, part, group=self._box)
        else:
            dist.gather(part, parts, group=self._box, group_dst=to)
        return None if parts is None else cut.whole(parts)

    @property
    def _box(self) -> dist.ProcessGroup:
        assert isinstance(self.wires, GroupWires), "ranks of a run talk over process groups"
        box = self.wires.box
        assert box is not None, "a box has at least two ranks"
        return box


def _replace(parameter: nn.Parameter, value: Tensor) -> None:
    """Gives a parameter a tensor of another shape. The object stays the same, so ties and optimizers keep it."""
    parameter.grad = None
    parameter.data = value
