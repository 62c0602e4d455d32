"""Shards of whole tensors by layout: takes a rank's shard, and joins all shards. Shards are called parts here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.capture.shard.layouts.layout import Layout, length, local_shape
from meshwright.costs.scheme import Grid


def _blocks(layout: Layout, grid: Grid, rank: int) -> Iterator[tuple[int, int, int]]:
    """Returns for each factor its position, and the offset and length of a rank's block."""
    at = grid.at(rank)
    for place, factor in enumerate(factor for dim in layout for factor in dim):
        index = 0
        for axis in factor.axes:
            index = index * grid.size((axis,)) + at[axis]
        block = factor.size // grid.size(factor.axes)
        yield place, index * block, block


def part_of(tensor: Tensor, layout: Layout, grid: Grid, rank: int) -> Tensor:
    """Returns a rank's part of a whole tensor. Padding is filled with zeros."""
    for at, dim in enumerate(layout):
        if (missing := sum(f.size for f in dim if f.real is not None) - sum(f.real for f in dim if f.real is not None)) > 0:
            shape = (*tensor.shape[:at], missing, *tensor.shape[at + 1 :])
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], at)
    view = tensor.reshape([factor.size for dim in layout for factor in dim])
    for place, start, size in _blocks(layout, grid, rank):
        view = view.narrow(place, start, size)
    return view.reshape(local_shape(layout, grid)).contiguous()


def whole_of(parts: Sequence[Tensor], layout: Layout, grid: Grid) -> Tensor:
    """Returns the whole tensor from the parts of all ranks, in order."""
    view = parts[0].new_empty([factor.size for dim in layout for factor in dim])
    sizes = [factor.size // grid.size(factor.axes) for dim in layout for factor in dim]
    for rank, part in enumerate(parts):
        place = view
        for dim, start, size in _blocks(layout, grid, rank):
            place = place.narrow(dim, start, size)
        place.copy_(part.reshape(sizes))
    found = view.reshape([_product(f.size for f in dim) for dim in layout])
    for at, size in enumerate(map(length, layout)):
        found = found.narrow(at, 0, size)
    return found.contiguous()


def _product(sizes: Iterator[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


@dataclass(frozen=True, slots=True)
class StoredCut:
    """How a parameter, and tensors of its shape such as optimizer state, are cut over the ranks of a box."""

    layout: Layout
    grid: Grid

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(map(length, self.layout))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of a part."""
        return local_shape(self.layout, self.grid)

    def part(self, whole: Tensor, coordinate: int) -> Tensor:
        """Returns the part of a whole tensor at a coordinate."""
        return part_of(whole, self.layout, self.grid, coordinate)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor from the parts of all coordinates, in order."""
        return whole_of(parts, self.layout, self.grid)
