"""Refuses parameters that share memory with another tensor of the model, where training would separate them.

`self.v = nn.Parameter(self.w.data)` makes two parameters of one memory: in one process an update of one changes the other. A run
keeps that only if one rank updates both in place, one after the other. Views of one tensor without a common element are fine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.runtime.stage.layers import Layers


def refuse_shared_storage(schedule: Schedule, layers: Layers) -> None:
    """Raises if a parameter shares elements with another parameter or buffer, and the run would not keep that."""
    in_place = schedule.flush and schedule.sharding is Sharding.NONE and layers.tensor is None
    unit_of: dict[Tensor, int] = {p: unit for unit in range(schedule.units) for p in layers.unit(unit)}
    names: dict[Tensor, str] = {**layers.names}
    for stage in range(layers.stages):
        for index, layer in enumerate(layers.of_stage(stage), layers.starts[stage]):
            for name, buffer in layer.named_buffers():
                names.setdefault(buffer, f"{index}.{name}")
                unit_of.setdefault(buffer, stage)
    for one, other in _pairs([t for t in names if _has_memory(t)]):
        if not in_place or unit_of.get(one) != unit_of.get(other):
            raise MeshwrightError(
                f"{names[one]} and {names[other]} share memory: an update of one changes the other in one process, but "
                f"{'a copy of each is updated' if not in_place else 'they are in different stages'} under {schedule.name}"
                f"{'' if schedule.sharding is Sharding.NONE else f' with {schedule.sharding.value}'}",
                fix="use one nn.Parameter in both places, or give each its own memory with .clone()",
            )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _pairs(tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tensors with a common element, at least one of them a parameter."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for where, found in by_storage.items():
        for index, one in enumerate(found):
            for other in found[index + 1 :]:
                if where and (isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter)) and _overlap(one, other):
                    yield one, other


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors on one storage share an element. Different dtypes: whether their ranges meet."""
    (first, last), (start, stop) = _span(one), _span(other)
    if last <= start or stop <= first:
        return False
    if one.dtype != other.dtype:
        return True
    begin, size = min(first, start), one.element_size()
    marks = torch.zeros((max(last, stop) - begin) // size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), (first - begin) // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), (start - begin) // size).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor and the byte after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
