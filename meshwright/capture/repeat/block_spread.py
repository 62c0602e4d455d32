"""Where the operations of a shortened list of blocks are in the whole list.

    short   | before | 0 | 1 | 2 | 3 | 4 after |
    whole   | before | 0 | 1 | 2 | 3 | 3' | 3'' | 4 after |         3 is the source, `period` its number of operations

An operation of the source reads its own block and the block before it. A copy k blocks later reads the same, k blocks later.
Values made before block 1 (masks, a bias that all blocks share) are read unchanged by all copies. Nothing else can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


class NotEqualError(Exception):
    """Blocks differ, or depend on each other in a way that cannot be repeated. The model is then captured whole."""


@dataclass(frozen=True, slots=True)
class BlockSpread:
    """The first operation of each block that is kept, the number of all operations, and the number of blocks to add."""

    starts: tuple[int, ...]
    length: int
    extra: int

    def __post_init__(self) -> None:
        one, two, three, last = self.starts[-4:]
        if not (0 < three - two == two - one == last - three and self.starts[0] < one and last < self.length):
            raise NotEqualError("blocks have different numbers of operations")

    @property
    def period(self) -> int:
        """The operations of a block."""
        return self.starts[-1] - self.starts[-2]

    @property
    def source(self) -> range:
        """The operations of the block that is repeated."""
        return range(self.starts[-2], self.starts[-1])

    def operations(self) -> Iterator[tuple[int, int]]:
        """Yields the operations of the whole list: an operation of the shortened list, and by how many blocks it moves."""
        yield from ((at, 0) for at in range(self.starts[-1]))
        yield from ((at, by) for by in range(1, self.extra + 1) for at in self.source)
        yield from ((at, self.extra) for at in range(self.starts[-1], self.length))

    def moves(self, reader: int, read: int) -> bool:
        """Returns whether what an operation reads moves along with it."""
        if reader < self.starts[-2] or read < self.starts[1]:
            return False
        nearest = self.starts[-2] if reader >= self.starts[-1] else self.starts[-3]
        if read < nearest:
            raise NotEqualError(f"operation {reader} reads a block that is not next to its own")
        return True

    def place(self, at: int, by: int) -> int:
        """Returns the number of an operation in the whole list."""
        return at + by * self.period
