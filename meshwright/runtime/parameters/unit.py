"""A sync unit: parameters that are summed, updated and versioned together (the own parameters of a stage, or one tie group).

A schedule with a flush has one version and updates in place. Without a flush, forwards run on leaves that share the storage of
their version. If the old version is still needed, an update moves the parameters to new storage.

`gradient_buffer.py` has their gradients. Ranks that hold a unit may divide its update and the state of its optimizer among them
(`zero_shares.py`): then `updated` are pieces of the parameters, otherwise the parameters themselves. If another rank owns the
unit, this one has its gradients until it has passed them on, and its parameters while it uses them (`borrowed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from meshwright.runtime.parameters.borrowed import Borrowed
from meshwright.runtime.parameters.gradient_buffer import Adder, Buffer, square_norm
from meshwright.runtime.parameters.versions import Versions
from meshwright.runtime.parameters.zero_gradients import SlicedBuffer
from meshwright.runtime.parameters.zero_shares import Shares
from meshwright.runtime.stage.tensor_parameters import TensorParameters

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Creates an optimizer for some parameters."""

UnitOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]
"""Creates an optimizer for the parameters of a unit, or None if it trains none of them."""

Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
"""Creates a learning-rate scheduler for an optimizer."""

Pieces = Callable[[nn.Parameter, nn.Parameter], None]
"""Called with a piece, which the optimizer gets, and the parameter that it is a piece of."""


class Unit:
    """The parameters of a unit on this rank, with their gradients, versions and optimizer."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        optimizer: UnitOptimizer,
        scheduler: Scheduler | None = None,
        adder: Callable[[Sequence[Tensor]], Adder] | None = None,
        versioned: bool = False,
        rounds: int = 1,
        first: int = 0,
        late: bool = False,
        tensor: TensorParameters | None = None,
        divided: Callable[[Sequence[nn.Parameter]], Shares] | None = None,
        divides_frozen: bool = False,
        singly: bool = False,
        pieces: Pieces | None = None,
        owned: bool = True,
    ) -> None:
        """`rounds` is the number of rounds of a walk, `first` and `late` are those of its `Versions`.

        A unit with one version and one round has one buffer.
        With `divided`, the holders divide the unit among them, and with `singly` they sum after every backward. They divide what
        is trained, and with `divides_frozen` the rest too. `pieces` is told which parameter each piece belongs to, before the
        optimizer is made. Without `owned`, another rank keeps and updates the parameters.
        """
        self.params = [p for p in params if p.requires_grad]
        self.tensor = tensor
        self.rounds = rounds
        self.borrowed = None if owned else Borrowed(self.params)
        self.versions = Versions(self.params, first=first, late=late) if versioned and owned else None
        self.shares = divided(self.params) if divided is not None and self.params else None
        frozen = [p for p in params if not p.requires_grad]
        self.frozen_shares = divided(frozen) if divided is not None and frozen and divides_frozen else None
        self._shares = [found for found in (self.shares, self.frozen_shares) if found is not None]
        self.pieces = {piece.whole: piece for found in self._shares for piece in found.pieces}
        trained = [] if self.shares is None else self.shares.pieces
        self.updated = self.params if self.shares is None else [piece.parameter for piece in trained]
        if pieces is not None:
            for piece in trained:
                pieces(piece.parameter, piece.whole)
        self.optimizer = optimizer(self.updated) if self.updated and owned else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        self.buffers: dict[int, Buffer] = {}
        self.spare = [self._empty()]
        self.buffer_bytes = sum(flat.nbytes for flat in self.spare[0].flats)
        self.adder = None if adder is None else adder(self.spare[0].flats)
        if not owned:
            self.spare.clear()
        self.handed: dict[int, list[Tensor]] = {}
        self.watch: Callable[[int, list[nn.Parameter], list[Tensor]], None] | None = None
        self.landed: Callable[[int], None] | None = None
        if not versioned and not singly:
            self._aim(self.params, self.spare[0])

    def held(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Returns what this rank has of a parameter for itself: all of it, a piece of it, or None if others have all of it."""
        if parameter not in self.divided_params:
            return parameter
        return self.pieces[parameter].parameter if parameter in self.pieces else None

    @cached_property
    def divided_params(self) -> frozenset[nn.Parameter]:
        """The parameters of which holders have pieces."""
        return frozenset(p for found in self._shares for p in found.params)

    def buffer(self, round_: int) -> Buffer:
        """Returns the gradients of a round. A unit with one version and one round has one buffer, which its parameters use."""
        found = self.buffers.get(round_)
        if found is None:
            found = self.buffers[round_] = self.spare.pop() if self.spare else self._empty()
        return found

    def aim(self, version: int, round_: int) -> None:
        """Makes the gradients of a version's leaves accumulate in the buffer of a round.

        With one version, the leaves are the parameters.
        """
        self._aim(self.at(version), self.buffer(round_))

    def _aim(self, leaves: Sequence[Tensor], buffer: Buffer) -> None:
        buffer.open()
        for at, view in zip(leaves, buffer.views, strict=True):
            at.grad = view

    def at(self, version: int) -> Sequence[Tensor]:
        """Returns the leaves that forwards of a version read."""
        if self.borrowed is not None:
            return self.borrowed.leaves[version]
        return self.params if self.versions is None else self.versions.leaves[version]

    def sync(self, round_: int, *, single: bool = False, last: bool = True) -> None:
        """Starts to sum over all ranks that hold this unit; with `single`, the gradients of one backward, the last or not."""
        buffer = self.buffer(round_)
        if self.shares is not None and self.tensor is not None:
            buffer.open()
            self.tensor.sum_parts(self.params, buffer.views)  # later there are only slices of parts
        if single and isinstance(buffer, SlicedBuffer):
            buffer.add(self.adder, last=last)
        elif self.adder is not None or self.shares is not None:
            buffer.start(self.adder)

    def take_over(self) -> None:
        """Follows `parameter.data = ...` between two walks: actions read memory of versions, and updates write flat storage."""
        if self.versions is not None:
            self.versions.take_over()
        if self.shares is not None and self.shares.keeps_whole:
            self.shares.take_over()

    def gather(self) -> None:
        """Starts to gather the slices that the holders have."""
        for found in self._shares:
            found.start_gather()

    def wait(self) -> None:
        """Returns when all parameters are whole."""
        for found in self._shares:
            found.wait()

    @property
    def keeps_whole(self) -> bool:
        """Whether this rank has whole parameters between uses."""
        return all(found.keeps_whole for found in self._shares)

    def free(self) -> None:
        """Frees parameters that were gathered for some actions."""
        for found in self._shares:
            found.free()

    @contextmanager
    def whole(self, *, writes: bool = False) -> Iterator[None]:
        """Makes the parameters whole for a while. All holders do this together. With `writes`, changes are kept."""
        if self.keeps_whole:
            yield
            return
        self.gather()
        self.wait()
        yield
        for found in self._shares if writes else ():
            found.keep_own()
        self.free()

    def square(self, round_: int, factor: float = 1.0) -> float:
        """Returns the sum of squares of the mean gradient. Of equal parts in a box, one rank counts."""
        views = self._finished(round_, factor).gradients
        wholes = self.params if self.shares is None else [piece.whole for piece in self.shares.pieces]
        views = [v for p, v in zip(wholes, views, strict=True) if self.tensor is None or self.tensor.counted[p]]
        return sum(square_norm(view) for view in views)

    def update(
        self, round_: int, *, in_place: bool = True, scale: float | None = 1.0, factor: float = 1.0, keep: bool = False
    ) -> None:
        """Turns version k into k + 1 with the mean gradient times `scale`. If `scale` is None, the parameters stay as they are.

        Scaling and the optimizer may change the buffer. `keep` saves a copy of the mean for the ranks that it is sent to later.
        """
        buffer = self._finished(round_, factor)
        if keep:
            self.handed[round_] = [flat.clone() for flat in buffer.flats]
        views = buffer.gradients
        if self.watch is not None:
            self.show(round_, buffer)
        for p, view in zip(self.updated, views, strict=True) if self.versions or self.rounds > 1 or self.shares else ():
            if self.versions and not in_place:
                p.data = p.data.clone()
            p.grad = view
        if self.optimizer is not None and scale is not None:
            if scale != 1.0:
                for view in views:
                    view.mul_(scale)
            absent = buffer.absent()
            for i in absent:
                self.updated[i].grad = None
            self.optimizer.step()
            for i in absent:
                self.updated[i].grad = views[i]
        if self.scheduler is not None and scale is not None:
            self.scheduler.step()
        if self.versions is not None:
            self.versions.add(round_ + 1)

    def show(self, round_: int, buffer: Buffer) -> None:
        """Shows whole parameters and gradients to `watch`. All holders do this together."""
        assert self.watch is not None
        with self.whole():
            self.watch(round_, self.params, buffer.whole_gradients())

    def _empty(self) -> Buffer:
        return Buffer.like(self.params) if self.shares is None else SlicedBuffer(self.shares)

    def _finished(self, round_: int, factor: float) -> Buffer:
        """Waits for the mean gradient of a round and returns its buffer."""
        buffer = self.buffer(round_)
        buffer.wait()
        if self.tensor is not None and self.shares is None and not buffer.is_divided:
            self.tensor.sum_parts(self.params, buffer.views)
        buffer.finish(factor)
        if self.landed is not None:
            self.landed(round_)
        return buffer

    def release(self, round_: int) -> None:
        """Frees the gradients of a round. A rank that owns the unit keeps the memory for the next round."""
        buffer = self.buffers.pop(round_)
        if self.borrowed is None:
            buffer.clear()
            self.spare.append(buffer)
