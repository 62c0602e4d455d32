"""Finds lists of blocks that look equal, and lets a model run with a few of them.

    transformer.h: 0 1 2 3 4 ... 94 95      the whole list
    transformer.h: 0 1 2 3 95               the same list, shortened

Looks are a guess. Whether the blocks that are left out do the same as the others is proved by `operation_log.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from meshwright.torch_internals import module_tables

KEPT = 5
"""The blocks of a shortened list: the first, which may differ, one that is read, two that are compared, and the last."""
LEAST = 8
"""A run of fewer blocks is captured as it is."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The members `first` to `last` of a list of modules, which look equal."""

    path: str
    first: int
    last: int

    @property
    def kept(self) -> tuple[str, ...]:
        """The paths of the members that stay in the shortened list."""
        return tuple(self.member(k) for k in (*range(self.first, self.first + KEPT - 1), self.last))

    @property
    def source(self) -> int:
        """The member that stands for those that are left out."""
        return self.first + KEPT - 2

    @property
    def left_out(self) -> range:
        """The members that the shortened list lacks."""
        return range(self.source + 1, self.last)

    def member(self, number: int) -> str:
        """The path of a member."""
        return f"{self.path}.{number}"

    def moved(self, name: str, by: int) -> str:
        """Returns a name in the source block as it is in the block `by` members later. Other names do not change."""
        own = self.member(self.source)
        return f"{self.member(self.source + by)}{name[len(own) :]}" if name == own or name.startswith(f"{own}.") else name


def block_runs(model: nn.Module, least: int = LEAST) -> list[BlockRun]:
    """Returns the longest run of members that look equal, for every list of modules that has a long one."""
    found: list[BlockRun] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{run.path}.") for run in found)
        if isinstance(module, nn.ModuleList) and len(module) >= least and not inside:
            runs = [list(run) for _, run in groupby(range(len(module)), key=[_look(block) for block in module].__getitem__)]
            longest = max(runs, key=len)
            if len(longest) >= max(least, KEPT + 1):
                found.append(BlockRun(path, longest[0], longest[-1]))
    return found


def _look(block: nn.Module) -> Hashable:
    """What can be seen of a block without running it: its modules, and the sizes of its tensors."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    sizes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    return tuple((name, type(module)) for name, module in block.named_modules()), sizes


@contextmanager
def shortened(model: nn.Module, runs: Sequence[BlockRun]) -> Iterator[None]:
    """Takes blocks out of their lists; puts them back at the end."""
    tables = [module_tables(model.get_submodule(run.path))[1] for run in runs]
    whole = [dict(table) for table in tables]
    try:
        for run, table in zip(runs, tables, strict=True):
            for number in run.left_out:
                del table[str(number)]
        yield
    finally:
        for table, every in zip(tables, whole, strict=True):
            table.clear()
            table.update(every)
