"""Advances a random generator as if a tensor had been filled, without allocating the tensor.

The CPU generator makes numbers one after another, so one long fill leaves it in the same state as several short ones. This is
tested once for each distribution and dtype on a small tensor. If it does not hold, the tensor is really filled.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Generator, Tensor

CHUNK = 1 << 16
"""How many numbers are drawn at a time: a multiple of the 16 that torch makes together."""


def skip(kind: str, count: int, dtype: torch.dtype, generator: Generator | None = None) -> bool:
    """Advance a generator by `count` numbers of `uniform_` or `normal_`. Returns False if that is not known to be exact."""
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
    """True if drawing in chunks leaves the generator in the same state as one fill."""
    for count in (1, 15, 64, 16 * 23, 16 * 23 + 1, 16 * 23 + 15):
        after = []
        for chunk in (1 << 20, 32):
            generator = Generator().manual_seed(count)
            _in_chunks(kind, count, dtype, chunk, generator)
            after.append(generator.get_state())
        if not torch.equal(*after):
            return False
    return True
