"""The words that every mode sends and keeps, computed from its scheme, one collective at a time, before anything runs.

A word is one element of a tensor. Collectives are rings. On g ranks, a gather of n local words sends (g - 1) n words, a
reduce-scatter of n words sends (g - 1) n / g, and an all-reduce sends twice that. Tests require that the transfer log of a run
has exactly these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from meshwright.costs.product_plan import ProductPlan, product_plan
from meshwright.costs.scheme import Axes, Grid, Save, Scheme, Words


class CollectiveKind(StrEnum):
    """The kinds of transfers."""

    GATHER = "gather"
    SCATTER = "scatter"
    TOTAL = "total"


class Phase(StrEnum):
    """When a transfer happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SYNC = "sync"


class Role(StrEnum):
    """Which way a product goes: from the residual spread to the inner spread, or back."""

    EXPAND = "expand"
    CONTRACT = "contract"


@dataclass(frozen=True, slots=True)
class SentWords:
    """One collective on one rank: the words that it sends, and the number of ring steps."""

    phase: Phase
    kind: CollectiveKind
    axes: Axes
    words: Fraction
    steps: int


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Products that read the same input of `rows` x `into` words, and their widths. Siblings (q, k, v) share one gather."""

    role: Role
    rows: int
    into: int
    outs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Declared:
    """All transfers of some products, and the words that a rank holds for them."""

    transfers: tuple[SentWords, ...]
    weight_words: Fraction
    saved_words: Fraction
    transient_words: Fraction

    def words(self, phase: Phase) -> Fraction:
        """The words of a phase."""
        return sum((t.words for t in self.transfers if t.phase is phase), Fraction(0))

    def steps(self, phase: Phase) -> int:
        """The steps of a phase."""
        return sum(t.steps for t in self.transfers if t.phase is phase)

    @property
    def total(self) -> Words:
        """The sums of all phases."""
        forward, backward, sync = (self.words(phase) for phase in Phase)
        return Words(forward, backward, sync, self.steps(Phase.FORWARD), self.steps(Phase.BACKWARD))


def transfer(phase: Phase, kind: CollectiveKind, axes: Axes, words: Fraction | int, grid: Grid) -> SentWords:
    """Returns the transfer of a collective whose argument has this many local words."""
    ranks = grid.size(axes)
    if kind is CollectiveKind.GATHER:
        return SentWords(phase, kind, axes, Fraction((ranks - 1) * words), ranks - 1)
    once = Fraction(words) * (ranks - 1) / ranks
    if kind is CollectiveKind.SCATTER:
        return SentWords(phase, kind, axes, once, ranks - 1)
    return SentWords(phase, kind, axes, 2 * once, 2 * (ranks - 1))


def transformer_layer(*, batch: int, sequence: int, hidden: int) -> tuple[ProductShape, ...]:
    """The products of one layer: fused QKV, output projection, a feed-forward part of width 4h."""
    rows = batch * sequence
    return (
        ProductShape(Role.EXPAND, rows, hidden, (3 * hidden,)),
        ProductShape(Role.CONTRACT, rows, hidden, (hidden,)),
        ProductShape(Role.EXPAND, rows, hidden, (4 * hidden,)),
        ProductShape(Role.CONTRACT, rows, 4 * hidden, (hidden,)),
    )


def declared(scheme: Scheme, grid: Grid, shapes: Sequence[ProductShape]) -> Declared:
    """Returns the transfers of a sequence of products: forward, backward, and the reduction of weight gradients."""
    parts = [_product(scheme, grid, shape) for shape in shapes]
    transfers = tuple(t for part in parts for t in part.transfers)
    weight = sum((part.weight_words for part in parts), Fraction(0))
    saved = sum((part.saved_words for part in parts), Fraction(0))
    return Declared(transfers, weight, saved, max((part.transient_words for part in parts), default=Fraction(0)))


def _product(scheme: Scheme, grid: Grid, shape: ProductShape) -> Declared:
    expands = shape.role is Role.EXPAND
    have, want = (scheme.residual, scheme.inner) if expands else (scheme.inner, scheme.residual)
    matrix = scheme.expand if expands else scheme.contract
    plan = product_plan(have, want, matrix)
    cut = grid.size((*have.rows, *have.sequence, *have.features))
    shard = Fraction(shape.rows * shape.into, cut)
    found, wide = _gathers(grid, shard, [axis for _, axis in plan.input_gathers])
    weight = whole = made = Fraction(0)
    for out in shape.outs:
        stored = Fraction(shape.into * out, grid.size((*matrix.out, *matrix.into)))
        moves, gathered = _gathers(grid, stored, [axis for _, axis in plan.weight_gathers])
        y = Fraction(shape.rows * out, grid.size((*plan.rows, *plan.outputs)))
        found += moves + _reduced(grid, y, plan)
        found += [transfer(Phase.SYNC, CollectiveKind.TOTAL, axes, stored, grid) for axes in [grid.wide(plan.unsummed)] if axes]
        weight, whole, made = weight + stored, whole + gathered, made + y
    if axes := grid.wide(plan.copy):
        found.append(transfer(Phase.BACKWARD, CollectiveKind.TOTAL, axes, wide, grid))
    if scheme.save is Save.SHARDS:  # gathered again for the backward pass
        again = [t for t in found if t.phase is Phase.FORWARD and t.kind is CollectiveKind.GATHER]
        found += [SentWords(Phase.BACKWARD, t.kind, t.axes, t.words, t.steps) for t in again]
    kept = shard if scheme.save is Save.SHARDS else wide + (whole if whole != weight else 0)
    return Declared(tuple(found), weight, kept, wide + whole + made)


def _gathers(grid: Grid, words: Fraction, axes: Iterable[str]) -> tuple[list[SentWords], Fraction]:
    """Returns gathers in sequence, their adjoint scatters, and the number of words after them."""
    found = []
    for axis in [axis for axis in axes if grid.size((axis,)) > 1]:
        found.append(transfer(Phase.FORWARD, CollectiveKind.GATHER, (axis,), words, grid))
        words *= grid.size((axis,))
        found.append(transfer(Phase.BACKWARD, CollectiveKind.SCATTER, (axis,), words, grid))
    return found, words


def _reduced(grid: Grid, words: Fraction, plan: ProductPlan) -> list[SentWords]:
    """Returns the transfers that reduce a partial product: a scatter or a sum."""
    found = []
    for axis in [axis for _, axis in plan.scatters if grid.size((axis,)) > 1]:
        found.append(transfer(Phase.FORWARD, CollectiveKind.SCATTER, (axis,), words, grid))
        words /= grid.size((axis,))
        found.append(transfer(Phase.BACKWARD, CollectiveKind.GATHER, (axis,), words, grid))
    if axes := grid.wide(plan.total):
        found.append(transfer(Phase.FORWARD, CollectiveKind.TOTAL, axes, words, grid))
    return found
