"""A comparison of all tensor modes and boxes with a given number of ranks: words, steps and memory of one transformer layer.

Weights and saved inputs are those of the four matrix products (fused QKV, 4h). Words of norms and of the loss are not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from meshwright.costs.declared import declared, transformer_layer
from meshwright.costs.modes import mode
from meshwright.costs.scheme import Grid, Save, TensorRequest


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One mode on one grid. Numbers are None if a captured model cannot run on it."""

    mode: str
    grid: tuple[int, ...]
    words_forward: Fraction | None = None
    words_backward: Fraction | None = None
    words_sync: Fraction | None = None
    steps: int | None = None
    weight_words: Fraction | None = None
    saved_words: Fraction | None = None
    feasible: bool = True
    reason: str = ""

    @property
    def words(self) -> Fraction:
        """All words of a step."""
        return sum((words or Fraction(0) for words in (self.words_forward, self.words_backward, self.words_sync)), Fraction(0))

    @property
    def held(self) -> Fraction:
        """The words that a rank holds: its weights, and what it keeps for the backward pass."""
        return (self.weight_words or Fraction(0)) + (self.saved_words or Fraction(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """A batch and a layer; `heads` may be left out."""

    batch: int
    sequence: int
    hidden: int
    heads: int | None = None


def requests(ranks: int) -> Iterator[tuple[str, TensorRequest]]:
    """Returns every mode and box with this many ranks."""
    yield "line", TensorRequest(tp=ranks)
    yield "line", TensorRequest(tp=ranks, sequence=True)
    for depth in (d for d in range(1, ranks + 1) if ranks % d == 0):
        side = math.isqrt(ranks // depth)
        if side * side * depth == ranks and depth <= side:
            yield ("grid", TensorRequest(tp=ranks)) if depth == 1 else ("tesseract", TensorRequest(tp=ranks, depth=depth))
    for w in (w for w in range(1, ranks + 1) if ranks % w == 0):
        for a in (a for a in range(1, ranks // w + 1) if (ranks // w) % a == 0):
            yield "box", TensorRequest(box=(w, a, ranks // w // a))


def tensor_rows(sizes: LayerSizes, *, ranks: int, save: Save = Save.SHARDS) -> list[TensorRow]:
    """Returns the rows of a comparison: those with the fewest words first, those with sizes that do not divide last.

    Args:
        sizes: The batch of one worker, the length of a sequence, the width of the layer, and its heads if they are known.
        ranks: The number of ranks of a worker.
        save: The tensors that products keep for the backward pass.
    """
    found = []
    for name, asked in requests(ranks):
        grid = mode(name).grid(asked)
        scheme = mode(name).scheme(grid, save=save)
        layer = transformer_layer(batch=sizes.batch, sequence=sizes.sequence, hidden=sizes.hidden)
        all_of = declared(scheme, grid, layer)
        words, reason = all_of.total, _reason(grid, sizes)
        steps = words.forward_steps + words.backward_steps
        cells = tuple(size for _, size in grid.sizes)
        sums = words.forward, words.backward, words.sync
        found.append(TensorRow(grid.mode, cells, *sums, steps, all_of.weight_words, all_of.saved_words, not reason, reason))
    return in_order(found)


def in_order(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Returns the rows with the fewest words first, and those that cannot run last."""
    return sorted(rows, key=lambda row: (not row.feasible, row.words, row.steps or 0))


def best_row(rows: Sequence[TensorRow], *, limit_words: float = math.inf) -> TensorRow | None:
    """Returns the row with the fewest words among those whose sizes divide and whose weights and saved inputs fit."""
    fit = [row for row in rows if row.feasible and row.held <= limit_words]
    return min(fit, key=lambda row: (row.words, row.steps or 0), default=None)


def _reason(grid: Grid, sizes: LayerSizes) -> str:
    """Returns the first size that does not divide, the divisor and its axes; an empty text if all sizes divide."""
    scheme = mode(grid.mode.removesuffix("_sequence")).scheme(grid)
    residual, inner = scheme.residual, scheme.inner
    rows = tuple(axis for axis in residual.rows if axis not in scheme.movable)
    checks = [("batch", sizes.batch, inner.rows), ("batch", sizes.batch, rows)]
    if sizes.batch % grid.size(residual.rows):
        checks.append(("sequence", sizes.sequence, scheme.movable or residual.rows))
    for matrix in (scheme.expand, scheme.contract):
        checks += [("hidden", sizes.hidden, matrix.out), ("hidden", sizes.hidden, matrix.into)]
    if sizes.heads is not None:
        checks.append(("heads", sizes.heads, inner.features))
    for what, size, axes in checks:
        if size % grid.size(axes):
            return f"{what} {size} does not divide by {grid.size(axes)} ({', '.join(axes)})"
    return ""
