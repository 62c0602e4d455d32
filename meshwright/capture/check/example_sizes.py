"""Small examples for the comparison: two rows, three rows that are shorter, and one row.

The first rows of the batch are used. Dimensions that the trace left dynamic are shortened together wherever columns share a size:
to the window with the most labels, and for the second size to the end of the rows, where padding is. If the captured graph cannot
run a size, it is tried again with whole lengths, and then left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.capture.trace.export import open_sizes
from meshwright.capture.trace.graph import Flat
from meshwright.ir.column_names import TARGETS

TOKENS = 8
"""The largest number of tokens per row; the second size has two fewer."""

IGNORED = -100


@dataclass(frozen=True)
class Example:
    """Columns of one size."""

    columns: Mapping[str, Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each column."""
        return {name: tuple(t.shape) for name, t in self.columns.items()}

    def __str__(self) -> str:
        return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.shapes.items())


@dataclass(frozen=True)
class Wanted:
    """One size for the comparison: the examples to try for it, smallest first."""

    rows: int
    examples: tuple[Example, ...]


def small_examples(given: Mapping[str, Tensor], flat: Flat) -> Iterator[Wanted]:
    """Yield the sizes for the comparison. If the graph can run none of them, yield the whole example."""
    shapes: list[dict[str, tuple[int, ...]]] = []
    for rows, tokens in ((2, TOKENS), (3, TOKENS - 2), (1, TOKENS)):
        cut = [Example(shortened(given, rows, length, flat)) for length in (tokens, None)]
        if rows == 3:  # tried first; without labels the loss is nan, and the next example is used
            cut.insert(0, Example(shortened(given, rows, tokens, flat, end=True)))
        allowed = [e for e in cut if flat.refusal(e.shapes) is None and e.shapes not in shapes]
        if allowed:
            shapes.append(allowed[0].shapes)
            yield Wanted(rows, tuple(allowed))
    if not shapes:
        rows = len(next(iter(given.values())))
        yield Wanted(rows, (Example({name: t.clone() for name, t in given.items()}),))


def shortened(
    given: Mapping[str, Tensor], rows: int, tokens: int | None, flat: Flat | None = None, *, end: bool = False
) -> dict[str, Tensor]:
    """Return columns with this many rows, repeated if there are fewer, and at most `tokens` tokens; None keeps whole lengths.

    A length that `flat` requires to be fixed is not shortened.
    """
    found = {name: t[torch.arange(rows if len(t) else 0, device=t.device) % max(len(t), 1)] for name, t in given.items()}
    lengths = _open_lengths(given) if tokens is not None else {}
    for size in dict.fromkeys(lengths.values()):
        count = min(size, tokens or size)
        start = size - count if end else _busiest(found, size, count)
        cut = dict(found)
        for (name, dim), own in lengths.items():
            if own == size:
                cut[name] = cut[name].narrow(dim, start, count)
        if flat is None or flat.refusal(Example(cut).shapes) is None:
            found = cut
    return {name: t.clone() for name, t in found.items()}


def _open_lengths(given: Mapping[str, Tensor]) -> dict[tuple[str, int], int]:
    """Return the dimensions that may be shortened. A size is left out if it is also a static dimension of some column."""
    found: dict[tuple[str, int], int] = {}
    closed: set[int] = set()
    for name, t in given.items():
        is_open = open_sizes(t, lengths=True)
        for dim in range(1, t.dim()):
            if dim in is_open:
                found[name, dim] = t.shape[dim]
            elif t.shape[dim] > 1:
                closed.add(t.shape[dim])
    return {place: size for place, size in found.items() if size not in closed}


def _busiest(columns: Mapping[str, Tensor], size: int, count: int) -> int:
    """Return the start of the window of `count` tokens with the most labels, or with the most attended tokens."""
    for name in (*TARGETS, "attention_mask"):
        t = columns.get(name)
        if t is not None and t.dim() == 2 and t.shape[1] == size and not t.is_floating_point():
            counted = (t != IGNORED) if name in TARGETS else (t != 0)
            upto = torch.cat([torch.zeros(1, dtype=torch.int64, device=t.device), counted.sum(0).cumsum(0)])
            return int((upto[count:] - upto[:-count]).argmax())
    return 0
