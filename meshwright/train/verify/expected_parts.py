"""Converts the results of one process to those that a rank must have: whole tensors, or shards of its tensor coordinate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.capture.shard.layouts.layout import axes_of
from meshwright.ir.schedule import Schedule
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.stage.layers import Layers
from meshwright.train.setup.sharded_layers import ShardedGraph
from meshwright.train.verify.serial_reference import SerialTrace


@dataclass(frozen=True)
class Expected:
    """Returns the result of one process as a rank must have it: whole, or the shard of its tensor coordinate."""

    reference: SerialTrace
    mesh: Mesh
    sharded: ShardedGraph | None

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """Returns the part of a parameter or gradient that a rank has."""
        return whole if self.sharded is None else self.sharded.part(name, whole, self.mesh.coordinate_of(rank))

    def same_part(self, name: str, rank: int) -> object:
        """Returns a key that is equal for ranks whose parts of a parameter must be equal."""
        if self.sharded is None:
            return name
        axes, at = axes_of(self.sharded.cut(name).layout), self.sharded.grid.at(self.mesh.coordinate_of(rank))
        return name, tuple((axis, place) for axis, place in at.items() if axis in axes)

    def names(self, layers: Layers, schedule: Schedule) -> list[set[str]]:
        """Returns the names of the parameters that each rank must hold."""
        held: list[set[str]] = [set() for _ in range(self.mesh.processes)]
        for unit in range(schedule.units):
            for at in self.mesh.every_coordinate():
                for rank in at.holders(schedule, unit):
                    held[rank] |= {layers.names[p] for p in layers.unit(unit)}
        return held
