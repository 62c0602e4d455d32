"""1-D (Megatron-LM, 1909.08053): weights are cut on one axis p, and every rank has the whole residual stream.

    expand    x whole          W [out: p]   y [features: p]
    contract  x [features: p]  W [in: p]    y summed over p

With `sequence=True` (Megatron-SP, 2205.05198) the residual stream is cut too, and each sum becomes a scatter and a gather.
"""

from __future__ import annotations

from fractions import Fraction

from meshwright.costs.scheme import Grid, MatrixAxes, Save, Scheme, Spread, TensorRequest, Words, positive
from meshwright.errors import MeshwrightError


def grid(asked: TensorRequest) -> Grid:
    """Returns a grid with one axis. The name of the grid says whether the residual stream is cut too."""
    if asked.box is not None or asked.depth != 1:
        raise MeshwrightError(
            "line has one axis, so it takes neither a box nor a depth", fix='tensor="box", or tensor="tesseract"'
        )
    return Grid("line_sequence" if asked.sequence else "line", (("p", positive(asked.tp, mode="line")),))


def scheme(grid: Grid, *, save: Save = Save.SHARDS) -> Scheme:
    """Returns which axes cut which dimensions."""
    cut = grid.mode == "line_sequence"
    return Scheme(
        residual=Spread(rows=("p",) if cut else ()),
        inner=Spread(features=("p",)),
        expand=MatrixAxes(out=("p",)),
        contract=MatrixAxes(into=("p",)),
        table=MatrixAxes(out=("p",)),
        save=save,
        movable=("p",) if cut else (),
    )


def layer_words(grid: Grid, *, batch: int, sequence: int, hidden: int, save: Save = Save.SHARDS) -> Words:
    """Returns the words of the four products of a transformer layer: two sums forward and two backward.

    With a cut residual stream each sum is a scatter and a gather. If shards are kept, the backward gathers once more.
    """
    ranks, stream = grid.ranks, batch * sequence * hidden
    once = Fraction((ranks - 1) * stream, ranks)
    if grid.mode == "line":
        return Words(4 * once, 4 * once, Fraction(0), 4 * (ranks - 1), 4 * (ranks - 1))
    again = 2 if save is Save.SHARDS else 0
    return Words(4 * once, (4 + again) * once, Fraction(0), 4 * (ranks - 1), (4 + again) * (ranks - 1))
