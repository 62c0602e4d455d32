"""The gradients of a unit, summed by one reduction that also carries what belongs to the sum.

Gradients are in flat buffers, one per round and dtype; the gradient of a parameter is a view. The end of the buffer holds what
belongs to the sum, so that one reduction carries everything:

    [ gradient of p0 | gradient of p1 | ... | reached p0 | reached p1 | ... | weight | divided ]

`objective.py` defines the weight: one division after the sum gives the mean over the whole batch. `divided` is 1 after that, so
that a mean which a ring sends on after its update is not divided again. A parameter that no backward of any holder has
reached has no gradient, as in torch: the optimizer, including its weight decay, skips it.

If the holders of a unit divide it among them, a holder gets slices of the sum (`zero_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 << 20
"""The maximum size of one collective. With buckets, the first part is done while the rest is still being sent."""


class Sum(Protocol):
    """A sum that is in progress."""

    def wait(self) -> object:
        """Returns when the sum is complete."""


class Adder(Protocol):
    """Sums over all ranks that hold a unit. Each of them starts the same sums in the same order."""

    def start(self, tensors: Sequence[Tensor]) -> Sequence[Sum]:
        """Starts to sum tensors in place, without waiting."""

    def close(self) -> None:
        """Releases its resources."""


class Collective:
    """An all_reduce in buckets."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def start(self, tensors: Sequence[Tensor]) -> list[Sum]:
        """Launches the all_reduce of every bucket."""
        buckets = [bucket for t in tensors for bucket in t.split(max(1, BUCKET_BYTES // t.element_size()))]
        return [dist.all_reduce(bucket, group=self.group, async_op=True) for bucket in buckets]

    def close(self) -> None:
        """Does nothing, because the engine destroys its groups."""


def carrier_of(params: Sequence[Tensor]) -> torch.dtype:
    """Returns the dtype of the end of a buffer: the widest of its parameters."""
    wide = [p.dtype for p in params if p.dtype in (torch.float32, torch.float64)]
    return max(wide, key=lambda d: torch.finfo(d).bits, default=torch.float32)


def square_norm(tensor: Tensor) -> float:
    """Returns the squared norm of a tensor, computed in double precision. Complex numbers count with both their parts."""
    return float(torch.linalg.vector_norm(tensor.to(torch.promote_types(tensor.dtype, torch.float64))) ** 2)


@dataclass
class Buffer:
    """The gradients of one round: flat tensors by dtype, one view per parameter, and the sums in progress."""

    flats: list[Tensor]
    views: list[Tensor]
    weight: float = 0.0
    reached: int = 0
    """One bit per parameter: whether a backward of this rank has reached it."""
    sealed: bool = False
    divided: bool = False
    sums: list[Sum] = field(default_factory=list)

    @classmethod
    def like(cls, params: Sequence[Tensor]) -> Buffer:
        """Creates an empty buffer for these parameters."""
        carrier = carrier_of(params)
        dtypes = sorted({p.dtype for p in params} - {carrier}, key=str)
        device = params[0].device if params else torch.device("cpu")
        flats, views = [], {}
        for dtype in (*dtypes, carrier):
            mine = [(i, p) for i, p in enumerate(params) if p.dtype is dtype]
            more = len(params) + 2 if dtype is carrier else 0
            flat = torch.zeros(sum(p.numel() for _, p in mine) + more, dtype=dtype, device=device)
            start = 0
            for i, p in mine:
                views[i] = flat[start : start + p.numel()].view(p.shape)
                start += p.numel()
            flats.append(flat)
        return cls(flats, [views[i] for i in range(len(params))])

    @property
    def count(self) -> int:
        """The number of parameters."""
        return len(self.views)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradient of each tensor that the optimizer updates."""
        return self.views

    def whole_gradients(self) -> list[Tensor]:
        """Returns the gradient of each parameter. All holders call this together."""
        return self.views

    def open(self) -> None:
        """Makes room for the gradients that backwards add to. Here there is always room."""

    @property
    def sum_tensors(self) -> list[Tensor]:
        """The tensors that have the sum, or this rank's slices of it."""
        return self.flats

    def start(self, adder: Adder | None) -> None:
        """Starts to sum over all holders, without waiting."""
        self.seal()
        if adder is not None:
            self.sums.extend(adder.start(self.flats))

    def seal(self) -> None:
        """Writes the weight and the reached bits into the flat buffer. From then on the values in the buffer count."""
        last, count = self.flats[-1], self.count
        if self.reached == (1 << count) - 1:
            last[-2 - count : -2] = 1.0
        else:
            last[-2 - count : -2] = torch.tensor([float(self.reached >> i & 1) for i in range(count)])
        last[-2] = self.weight
        self.sealed = True

    def replaced(self) -> list[Tensor]:
        """Returns the tensors to receive a complete sum into. It brings its weight, also to a holder that has added nothing."""
        self.sealed = True
        return self.flats

    def wait(self) -> None:
        """Waits for the sum over all holders."""
        for one in self.sums:
            one.wait()
        self.sums.clear()

    @property
    def is_divided(self) -> bool:
        """Whether the sum was divided already, here or by the rank that sent it."""
        return bool(self.flats[-1][-1].item()) if self.sealed else self.divided

    def finish(self, factor: float = 1.0) -> None:
        """Waits for the sum. Divides it once by its weight and by `factor`, the loss scale."""
        self.wait()
        weight, divided = self.flats[-1][-2:].tolist() if self.sealed else (self.weight, self.divided)
        if divided:
            return
        weight = weight or 1.0  # nothing counted: gradients are zeros, or the last data-parallel copy of a summed loss had no row
        for flat in self.sum_tensors:
            flat.div_(weight * factor)
        self.divided = True
        if self.sealed:
            self.flats[-1][-1] = 1.0

    def absent(self) -> list[int]:
        """Returns which of `gradients` do not exist: no backward has reached the parameter, and its gradient is zero."""
        count = self.count
        if not self.sealed:
            missing = [i for i in range(count) if not self.reached >> i & 1] if self.reached != (1 << count) - 1 else []
        else:
            reached = self.flats[-1][-2 - count : -2]
            missing = [] if not count or reached.min().item() else [i for i, found in enumerate(reached.tolist()) if not found]
        return [i for i in missing if self.is_zero(i)]

    def is_zero(self, index: int) -> bool:
        """Returns whether the gradient of a parameter is zero."""
        return not self.views[index].any()

    def clear(self) -> None:
        """Resets the buffer for the next round."""
        for flat in self.flats:
            flat.zero_()
        self.weight, self.reached, self.sealed, self.divided = 0.0, 0, False, False
