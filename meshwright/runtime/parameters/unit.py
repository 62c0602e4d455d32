"""A sync unit: parameters that are summed, updated and versioned together (the own parameters of a stage, or one tie group).

Gradients are in flat buffers, one per round and dtype; the gradient of a parameter is a view. The end of the buffer holds what
belongs to the sum, so that one reduction carries everything:

    [ gradient of p0 | gradient of p1 | ... | reached p0 | reached p1 | ... | weight | divided ]

`objective.py` defines the weight: one division after the sum gives the mean over the whole batch. `divided` is 1 after that, so
that a mean which a ring sends on after its update is not divided again. A parameter that no backward of any holder has
reached has no gradient, as in torch: the optimizer, including its weight decay, skips it.

A schedule with a flush has one version and updates in place. Without a flush, forwards run on leaves that share the storage of
their version. If the old version is still needed, an update moves the parameters to new storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime.stage.tensor_parameters import TensorParameters

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Creates an optimizer for some parameters."""

Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
"""Creates a learning-rate scheduler for an optimizer."""

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
        wide = [p.dtype for p in params if p.dtype in (torch.float32, torch.float64)]
        carrier = max(wide, key=lambda d: torch.finfo(d).bits, default=torch.float32)
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

    def start(self, adder: Adder) -> None:
        """Starts to sum over all holders, without waiting."""
        self.seal()
        self.sums.extend(adder.start(self.flats))

    def seal(self) -> None:
        """Writes the weight and the reached bits into the flat buffer. From then on the values in the buffer count."""
        last, count = self.flats[-1], len(self.views)
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
        for flat in self.flats:
            flat.div_(weight * factor)
        self.divided = True
        if self.sealed:
            self.flats[-1][-1] = 1.0

    def absent(self) -> list[int]:
        """Returns the parameters without a gradient: no backward has reached them, and their gradients are zero."""
        count = len(self.views)
        if not self.sealed:
            missing = [i for i in range(count) if not self.reached >> i & 1] if self.reached != (1 << count) - 1 else []
        else:
            reached = self.flats[-1][-2 - count : -2]
            missing = [] if not count or reached.min().item() else [i for i, found in enumerate(reached.tolist()) if not found]
        return [i for i in missing if not self.views[i].any()]

    def clear(self) -> None:
        """Resets the buffer for the next round."""
        for flat in self.flats:
            flat.zero_()
        self.weight, self.reached, self.sealed, self.divided = 0.0, 0, False, False


class Unit:
    """The parameters of a unit on this rank, with their gradients, versions and optimizer."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        adder: Callable[[Sequence[Tensor]], Adder] | None = None,
        versioned: bool = False,
        rounds: int = 1,
        tensor: TensorParameters | None = None,
    ) -> None:
        """`rounds` is the number of rounds of a walk. A unit with one version and one round has one buffer."""
        self.params = [p for p in params if p.requires_grad]
        self.tensor = tensor
        self.versioned, self.rounds = versioned, rounds
        self.optimizer = optimizer(self.params) if self.params else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        self.buffers: dict[int, Buffer] = {}
        self.spare = [Buffer.like(self.params)]
        self.adder = None if adder is None else adder(self.spare[0].flats)
        self.handed: dict[int, list[Tensor]] = {}
        self.leaves: dict[int, list[Tensor]] = {}
        self.watch: Callable[[int, list[nn.Parameter], list[Tensor]], None] | None = None
        self.landed: Callable[[int], None] | None = None
        if versioned:
            self.leaves[0] = self._fresh_leaves()
        else:
            for p, view in zip(self.params, self.spare[0].views, strict=True):
                p.grad = view

    def buffer(self, round_: int) -> Buffer:
        """Returns the gradients of a round. A unit with one version and one round has one buffer, which its parameters use."""
        found = self.buffers.get(round_)
        if found is None:
            found = self.buffers[round_] = self.spare.pop() if self.spare else Buffer.like(self.params)
        return found

    def aim(self, version: int, round_: int) -> None:
        """Makes the gradients of a version's leaves accumulate in the buffer of a round.

        With one version, the leaves are the parameters.
        """
        for at, view in zip(self.at(version), self.buffer(round_).views, strict=True):
            at.grad = view

    def at(self, version: int) -> Sequence[Tensor]:
        """Returns the leaves that forwards of a version read."""
        return self.leaves[version] if self.versioned else self.params

    def sync(self, round_: int) -> None:
        """Starts to sum over all ranks that hold this unit."""
        if self.adder is not None:
            self.buffer(round_).start(self.adder)

    def square(self, round_: int, factor: float = 1.0) -> float:
        """Returns the sum of squares of the mean gradient. Of equal parts in a box, one rank counts."""
        buffer = self._finished(round_, factor)
        views = [v for p, v in zip(self.params, buffer.views, strict=True) if self.tensor is None or self.tensor.counted[p]]
        return float(sum(torch.linalg.vector_norm(view.double()) ** 2 for view in views))

    def update(
        self, round_: int, *, in_place: bool = True, scale: float | None = 1.0, factor: float = 1.0, keep: bool = False
    ) -> None:
        """Turns version k into k + 1 with the mean gradient times `scale`. If `scale` is None, the parameters stay as they are.

        Scaling and the optimizer may change the buffer. `keep` saves a copy of the mean for the ranks that it is sent to later.
        """
        buffer = self._finished(round_, factor)
        if keep:
            self.handed[round_] = [flat.clone() for flat in buffer.flats]
        if self.watch is not None:
            self.watch(round_, self.params, buffer.views)
        for p, view in zip(self.params, buffer.views, strict=True) if self.versioned or self.rounds > 1 else ():
            if self.versioned and not in_place:
                p.data = p.data.clone()
            p.grad = view
        if self.optimizer is not None and scale is not None:
            if scale != 1.0:
                for view in buffer.views:
                    view.mul_(scale)
            absent = buffer.absent()
            for i in absent:
                self.params[i].grad = None
            self.optimizer.step()
            for i in absent:
                self.params[i].grad = buffer.views[i]
        if self.scheduler is not None and scale is not None:
            self.scheduler.step()
        if self.versioned:
            self.leaves[round_ + 1] = self._fresh_leaves()

    def _finished(self, round_: int, factor: float) -> Buffer:
        """Waits for the mean gradient of a round and returns its buffer."""
        buffer = self.buffer(round_)
        buffer.wait()
        if self.tensor is not None and not buffer.is_divided:
            self.tensor.sum_parts(self.params, buffer.views)
        buffer.finish(factor)
        if self.landed is not None:
            self.landed(round_)
        return buffer

    def release(self, round_: int) -> None:
        """Frees the gradients of a round."""
        buffer = self.buffers.pop(round_)
        buffer.clear()
        self.spare.append(buffer)

    def drop(self, version: int) -> None:
        """Drops a version that no later instruction reads."""
        del self.leaves[version]

    def rebase(self) -> None:
        """At the end of a walk, makes the newest version version 0 of the next walk."""
        if self.versioned:
            self.leaves = {0: self.leaves[max(self.leaves)]}

    def _fresh_leaves(self) -> list[Tensor]:
        """Returns leaves on the parameters' storage.

        Each has its own version counter, so autograd does not count a later update in place as a write to it.
        """
        return [p.data.requires_grad_() for p in self.params]
