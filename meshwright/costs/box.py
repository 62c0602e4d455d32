"""3-D (Bian et al., 2105.14450) on any box w x a x b: gathers inputs on one axis and weights on another, scatters outputs.

    residual  [rows: w > a, features: b]      inner  [rows: w > b, features: a]
    expand    gather x on a, W [out: a > w, in: b] on w, scatter y on b
    contract  gather x on b, W [out: b > w, in: a] on w, scatter y on a

(p, p, p) is the cube of the paper, (P, 1, 1) is FSDP, and (1, P, 1) is Megatron with sequence parallelism.
"""

from __future__ import annotations

import math
from fractions import Fraction

from meshwright.costs.scheme import Grid, MatrixAxes, Save, Scheme, Spread, TensorRequest, Words
from meshwright.errors import MeshwrightError


def grid(asked: TensorRequest) -> Grid:
    """Returns the grid w x a x b. If no box is given, it is the cube with `tp` ranks."""
    box = asked.box
    if asked.depth != 1 or asked.sequence:
        raise MeshwrightError("box takes neither depth nor sequence", fix="box=(1, P, 1) is the line with a cut sequence")
    if box is None:
        side = round((asked.tp or 0) ** (1 / 3))
        if not asked.tp or side**3 != asked.tp:
            raise MeshwrightError(f"{asked.tp} ranks do not form a cube, so a box must be given", fix="box=(2, 2, 1)")
        box = (side, side, side)
    if len(box) != 3 or min(box) < 1:
        raise MeshwrightError(f"a box is three positive numbers (w, a, b), got {box}", fix="box=(2, 2, 1)")
    if asked.tp not in (None, math.prod(box)):
        raise MeshwrightError(f"box {box} has {math.prod(box)} ranks, tp={asked.tp}", fix=f"tp={math.prod(box)}, or leave tp out")
    return Grid("box", tuple(zip("wab", box, strict=True)))


def scheme(grid: Grid, *, save: Save = Save.SHARDS) -> Scheme:
    """Returns which axes cut which dimensions."""
    return Scheme(
        residual=Spread(rows=("w", "a"), features=("b",)),
        inner=Spread(rows=("w", "b"), features=("a",)),
        expand=MatrixAxes(out=("a", "w"), into=("b",)),
        contract=MatrixAxes(out=("b", "w"), into=("a",)),
        table=MatrixAxes(out=("a", "w"), into=("b",)),
        save=save,
        movable=("a",),
    )


def layer_words(grid: Grid, *, batch: int, sequence: int, hidden: int, save: Save = Save.SHARDS) -> Words:
    """Returns 4bsh words on axis a, 12bsh on b and 12h^2 on w in each direction.

    If shards are kept, the backward gathers 7bsh of inputs and all weights again.
    """
    w, a, b = (size for _, size in grid.sizes)
    stream, square = batch * sequence * hidden, hidden**2
    once = Fraction(4 * stream * (a - 1) + 12 * stream * (b - 1) + 12 * square * (w - 1), grid.ranks)
    again = Fraction(2 * stream * (a - 1) + 5 * stream * (b - 1) + 12 * square * (w - 1), grid.ranks)
    steps, more = 4 * (w + a + b - 3), 4 * (w - 1) + 2 * (a - 1) + 2 * (b - 1)
    if save is Save.GATHERED:
        return Words(once, once, Fraction(0), steps, steps)
    return Words(once, once + again, Fraction(0), steps, steps + more)
