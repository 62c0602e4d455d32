"""2-D (Optimus, 2104.05343): ranks on a q x q grid (i, j). All matrices are cut into q x q blocks, before and after a product.

    x [rows: i, features: j]   W [out: j, in: i]   y [rows: i, features: j]

In gather form: x is gathered along j and W along i, so that no partial sums remain. It sends as many words as SUMMA.
"""

from __future__ import annotations

from fractions import Fraction

from meshwright.costs.scheme import Grid, MatrixAxes, Save, Scheme, Spread, TensorRequest, Words, positive, whole_root
from meshwright.errors import MeshwrightError


def grid(asked: TensorRequest) -> Grid:
    """Returns a square grid."""
    if asked.box is not None or asked.depth != 1 or asked.sequence:
        raise MeshwrightError("grid is q x q, so it takes no box, depth or sequence", fix="tp=4, or another mode")
    side = whole_root(positive(asked.tp, mode="grid"), mode="grid")
    return Grid("grid", (("i", side), ("j", side)))


def scheme(grid: Grid, *, save: Save = Save.SHARDS) -> Scheme:
    """Returns which axes cut which dimensions."""
    spread, matrix = Spread(rows=("i",), features=("j",)), MatrixAxes(out=("j",), into=("i",))
    return Scheme(residual=spread, inner=spread, expand=matrix, contract=matrix, table=matrix, save=save)


def layer_words(grid: Grid, *, batch: int, sequence: int, hidden: int, save: Save = Save.SHARDS) -> Words:
    """Returns 7bsh words of inputs and 12h^2 of weights for the forward, and as many for gradients in the backward.

    If shards are kept, the backward gathers them again.
    """
    side = grid.size("i")
    once = Fraction((side - 1) * (7 * batch * sequence * hidden + 12 * hidden**2), side**2)
    times = 2 if save is Save.SHARDS else 1
    return Words(once, times * once, Fraction(0), 8 * (side - 1), 8 * times * (side - 1))
