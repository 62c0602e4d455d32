"""Random numbers that nobody wants: the generator moves on as if a tensor had been filled, without the tensor.

The CPU generator hands out numbers one after another, so a long fill leaves it where shorter ones do. Whether that is so
for a kind of number and a dtype is tried once, on a small tensor; where it is not, the tensor is filled for real.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Generator, Tensor

CHUNK = 1 << 16
"""Numbers at a time: a whole number of the 16 that are made together."""


def skip(kind: str, count: int, dtype: torch.dtype, generator: Generator | None = None) -> bool:
    """Move a generator past `count` numbers, `uniform_` or `normal_`; False where that is not known to be exact."""
    if not _same(kind, dtype):
        return False
    _in_chunks(kind, count, dtype, CHUNK, generator)
    return True


def _in_chunks(kind: str, count: int, dtype: torch.dtype, chunk: int, generator: Generator | None) -> None:
    room = torch.empty(min(count, 2 * chunk), dtype=dtype)
    while count >= 2 * chunk:
        _fill(kind, room[:chunk], generator)
        count -= chunk
    _fill(kind, room[:count], generator)


def _fill(kind: str, room: Tensor, generator: Generator | None) -> None:
    if kind == "normal_":
        room.normal_(generator=generator)
    else:
        room.uniform_(generator=generator)


@cache
def _same(kind: str, dtype: torch.dtype) -> bool:
    """Do chunks leave the generator, and all that comes after, as one fill does?"""
    for count in (1, 15, 64, 16 * 23, 16 * 23 + 1, 16 * 23 + 15):
        after = []
        for chunk in (1 << 20, 32):
            generator = Generator().manual_seed(count)
            _in_chunks(kind, count, dtype, chunk, generator)
            after.append(generator.get_state())
        if not torch.equal(*after):
            return False
    return True
