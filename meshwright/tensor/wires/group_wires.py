"""Wires over torch.distributed: one process group per set of axes. All ranks create them at the start, in the same order."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.costs.declared import CollectiveKind, SentWords
from meshwright.costs.scheme import Axes, Grid
from meshwright.errors import MeshwrightError
from meshwright.tensor.wires.wires import StartedCollective, TotalKind, Wires

Groups = dict[Axes, dist.ProcessGroup]


def make_groups(grid: Grid, boxes: Sequence[Sequence[int]], rank: int) -> Groups:
    """Creates the groups of a global rank. `boxes` are the global ranks of every box, by coordinate. All ranks must call this."""
    found: Groups = {}
    for box in boxes:
        for count in range(1, len(grid.axes) + 1):
            for axes in itertools.combinations(grid.axes, count):
                if grid.wide(axes) != axes:
                    continue
                for members in sorted({grid.group(local, axes) for local in range(grid.ranks)}):
                    ranks = [box[local] for local in members]
                    group = _group_in_order(ranks)
                    if rank in ranks:
                        found[axes] = group
    return found


def _group_in_order(ranks: list[int]) -> dist.ProcessGroup:
    """Creates a group that numbers its ranks in this order, because shards are gathered and scattered by coordinate."""
    if ranks == sorted(ranks):
        plain: dist.ProcessGroup = dist.new_group(ranks)
        return plain
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise MeshwrightError(
            f"torch {torch.__version__} sorts the ranks of a group, but the ranks {ranks} share tensors in this order",
            fix="ascending ranks inside each tensor-parallel worker, or torch 2.13",
        )
    ordered: dist.ProcessGroup = dist.new_group(ranks, sort_ranks=False)
    return ordered


class GroupWires(Wires):
    """One rank of a grid on process groups."""

    def __init__(self, grid: Grid, rank: int, groups: Groups | None = None) -> None:
        """`groups` can be set later by `connect`: layers are made before ranks have compared their inputs."""
        super().__init__(grid, rank)
        self._groups = groups or {}

    def connect(self, groups: Groups) -> None:
        """Sets the process groups."""
        self._groups = groups

    @property
    def box(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the grid; None if there is only one."""
        return self._groups.get(self.grid.wide(self.grid.axes))

    def _carry(self, sent: SentWords, t: Tensor, dim: int, op: TotalKind) -> StartedCollective:
        group, ranks = self._groups[sent.axes], self.grid.size(sent.axes)
        if sent.kind is CollectiveKind.TOTAL:
            whole = t.clone(memory_format=torch.contiguous_format)
            how = dist.ReduceOp.SUM if op is TotalKind.SUM else dist.ReduceOp.MAX
            work = dist.all_reduce(whole, op=how, group=group, async_op=True)
            return _later(work, whole, 0, t)
        first = t.movedim(dim, 0).contiguous()  # kept alive until the wait: torch.distributed reads it
        if sent.kind is CollectiveKind.GATHER:
            joined = first.new_empty((ranks * first.shape[0], *first.shape[1:]))
            return _later(dist.all_gather_single(joined, first, group=group, async_op=True), joined, dim, first)
        part = first.new_empty((first.shape[0] // ranks, *first.shape[1:]))
        return _later(dist.reduce_scatter_single(part, first, group=group, async_op=True), part, dim, first)


def _later(work: Any, result: Tensor, dim: int, kept: Tensor) -> StartedCollective:
    def wait() -> Tensor:
        assert kept is not None
        work.wait()
        return result.movedim(0, dim)

    return StartedCollective(wait)
