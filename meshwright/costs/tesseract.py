"""2.5-D (Tesseract, 2105.14500): d layers of a q x q grid. Rows are cut over the depth too, and weights are replicated over it.

    x [rows: d > i, features: j]   W [out: j, in: i] on every depth   y [rows: d > i, features: j]

The gradients of weights are summed over the depth once per step.
"""

from __future__ import annotations

from fractions import Fraction

from meshwright.costs.scheme import Grid, MatrixAxes, Save, Scheme, Spread, TensorRequest, Words, positive, whole_root
from meshwright.errors import MeshwrightError


def grid(asked: TensorRequest) -> Grid:
    """Returns the grid depth x q x q."""
    ranks, depth = positive(asked.tp, mode="tesseract"), asked.depth
    if asked.box is not None or asked.sequence:
        raise MeshwrightError("tesseract takes a depth, but no box and no sequence", fix="tp=8, depth=2")
    if depth < 1 or ranks % depth:
        raise MeshwrightError(
            f"tesseract: depth {depth} does not divide {ranks} ranks", fix="tp = depth x q x q, as tp=8, depth=2"
        )
    side = whole_root(ranks // depth, mode=f"a layer of a tesseract of {ranks} ranks with depth {depth}", depth=depth)
    return Grid("tesseract", (("d", depth), ("i", side), ("j", side)))


def scheme(grid: Grid, *, save: Save = Save.SHARDS) -> Scheme:
    """Returns which axes cut which dimensions."""
    spread, matrix = Spread(rows=("d", "i"), features=("j",)), MatrixAxes(out=("j",), into=("i",))
    return Scheme(residual=spread, inner=spread, expand=matrix, contract=matrix, table=matrix, save=save)


def layer_words(grid: Grid, *, batch: int, sequence: int, hidden: int, save: Save = Save.SHARDS) -> Words:
    """Returns the words of the grid with 1/d of the rows, and a sum of 12h^2/q^2 weight gradients over the depth."""
    side, depth = grid.size("i"), grid.size("d")
    stream = Fraction(7 * batch * sequence * hidden, depth)
    once = Fraction(side - 1, side**2) * (stream + 12 * hidden**2)
    times = 2 if save is Save.SHARDS else 1
    sync = Fraction(2 * (depth - 1) * 12 * hidden**2, depth * side**2)
    return Words(once, times * once, sync, 8 * (side - 1), 8 * times * (side - 1))
