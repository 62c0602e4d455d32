"""ZeRO: how the holders of a unit divide it among them. Flat storage, one slice per holder, and pieces for the optimizer.

    flat        [ p0 ........ | p1 .. | p2 ............... | pad ]      one for each dtype; parameters are views of it
    slices      [ holder 0      | holder 1      | holder 2       ]      equal sizes
    pieces      [ p0            | p0    p1   p2 | p2             ]      what a slice has of each parameter, without its shape

Gradients are summed by a reduce-scatter: a holder gets the sum of its slice. Its optimizer has only its own pieces, so the state
of the optimizer is divided too. After the update an all-gather gives every holder all slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime.parameters.absent import hide, show


@dataclass(frozen=True)
class SliceSpan:
    """A piece of a parameter in a slice: elements `start` to `stop` of parameter number `param`, at `at` of slice `flat`."""

    param: int
    start: int
    stop: int
    flat: int
    at: int


@dataclass(frozen=True)
class FlatPlan:
    """Where the parameters of one dtype are in their flat storage."""

    dtype: torch.dtype
    places: tuple[tuple[int, int, int], ...]
    """(parameter, first element, number of elements)."""
    width: int
    """The number of elements of one slice."""


def flat_plans(params: Sequence[Tensor], shares: int) -> list[FlatPlan]:
    """Returns the layout of flat storages, in the order of dtypes that gradient buffers have too."""
    found = []
    for dtype in sorted({p.dtype for p in params}, key=str):
        places, at = [], 0
        for index, p in enumerate(params):
            if p.dtype is dtype:
                places.append((index, at, p.numel()))
                at += p.numel()
        found.append(FlatPlan(dtype, tuple(places), -(-at // shares)))
    return found


def views_of(plans: Sequence[FlatPlan], flats: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the part of each parameter in flat tensors, with its shape."""
    found: dict[int, Tensor] = {}
    for plan, flat in zip(plans, flats, strict=True):
        found |= {index: flat.narrow(0, at, count).view(params[index].shape) for index, at, count in plan.places}
    return [found[index] for index in range(len(params))]


def spans(plans: Sequence[FlatPlan], share: int) -> list[SliceSpan]:
    """Returns the pieces of the slices of one holder. The pieces of all holders cover every parameter exactly once.

    The first holder has the piece of a parameter without elements, so that its options and state are saved like others.
    """
    found = []
    for number, plan in enumerate(plans):
        first, last = share * plan.width, (share + 1) * plan.width
        for index, at, count in plan.places:
            start, stop = max(first, at), min(last, at + count)
            if start < stop:
                found.append(SliceSpan(index, start - at, stop - at, number, start - first))
            elif not count and share == 0:
                found.append(SliceSpan(index, 0, 0, number, 0))
    return found


@dataclass(frozen=True)
class ParameterPiece:
    """A part of a parameter that this rank updates. `parameter` shares its memory with a part of `whole`."""

    parameter: nn.Parameter
    whole: nn.Parameter
    span: SliceSpan


class Shares:
    """The division of one unit over its holders, on one rank. Every holder creates it in the same order."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        keeps_whole: bool = True,
    ) -> None:
        """Moves the parameters into flat storage. `group` is None if one rank holds the unit alone.

        Without `keeps_whole` this rank keeps its slices only. Parameters are whole between `start_gather` and `free`.
        """
        self.count, self.share, self.group, self.keeps_whole = len(ranks), ranks.index(rank), group, keeps_whole
        self.params = params
        self.plans = flat_plans(params, self.count)
        self.flats = [
            torch.zeros(plan.width * self.count, dtype=plan.dtype, device=params[plan.places[0][0]].device) for plan in self.plans
        ]
        self.take_over()
        self.own = self._slices_of(self.flats) if keeps_whole else [mine.clone() for mine in self._slices_of(self.flats)]
        self.pieces = [self._piece(span) for span in spans(self.plans, self.share)]
        self._under_way: list[dist.Work] = []
        if not keeps_whole:
            self.free()

    def take_over(self) -> None:
        """Moves parameters into flat storage, if they are in other memory: at first, and after `parameter.data = ...`."""
        for parameter, view in zip(self.params, self.views(self.flats), strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def _piece(self, span: SliceSpan) -> ParameterPiece:
        whole, mine = self.params[span.param], self.own[span.flat].narrow(0, span.at, span.stop - span.start)
        mine = mine if whole.dim() else mine.view(())  # its state is a number then, as that of the whole parameter
        return ParameterPiece(nn.Parameter(mine, requires_grad=whole.requires_grad), whole, span)

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Returns the part of each parameter in flat tensors, with its shape."""
        return views_of(self.plans, flats, self.params)

    def slices(self) -> list[Tensor]:
        """Returns empty tensors for the sums of this holder's slices."""
        return [torch.empty_like(own) for own in self.own]

    def start_scatter(self, flats: Sequence[Tensor], into: Sequence[Tensor]) -> list[dist.Work]:
        """Starts to sum gradients over all holders; this holder gets the sums of its slices."""
        if self.group is None:
            for flat, mine in zip(flats, into, strict=True):
                mine.copy_(flat)
            return []
        return [
            dist.reduce_scatter_single(mine, flat, group=self.group, async_op=True)
            for flat, mine in zip(flats, into, strict=True)
        ]

    def start_gather(self) -> None:
        """Starts to gather the slices of all holders into the parameters."""
        if not self.keeps_whole:
            self._open()
        for flat, own in zip(self.flats, self.own, strict=True):
            if self.group is not None:
                sent = own.clone() if self.keeps_whole else own
                self._under_way.append(dist.all_gather_single(flat, sent, group=self.group, async_op=True))
            elif not self.keeps_whole:
                flat.copy_(own)

    def _open(self) -> None:
        """Gives the parameters memory again: the same storage, because graphs hold views of it."""
        for flat in self.flats:
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        for parameter, view in zip(self.params, self.views(self.flats), strict=True):
            show(parameter)
            parameter.data = view

    def free(self) -> None:
        """Frees whole parameters. Until the next gather, a parameter keeps its shape and reads as NaN, integers as 0."""
        assert not self._under_way, "a gather writes into this memory"
        for parameter in self.params:
            hide(parameter)
        for flat in self.flats:
            flat.untyped_storage().resize_(0)

    def keep_own(self) -> None:
        """Copies this rank's slices from whole parameters, after something wrote into them."""
        for mine, new in zip(self.own, self._slices_of(self.flats), strict=True):
            mine.copy_(new)

    def _slices_of(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [flat.narrow(0, self.share * plan.width, plan.width) for plan, flat in zip(self.plans, flats, strict=True)]

    def wait(self) -> None:
        """Returns when the parameters are whole."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def joined(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Returns whole tensors, one for each parameter, from the slices of all holders. All holders call this together."""
        flats = []
        for mine in slices:
            flats.append(mine if self.group is None else mine.new_empty(mine.numel() * self.count))
            if self.group is not None:
                dist.all_gather_single(flats[-1], mine.contiguous(), group=self.group)
        return self.views(flats)
