"""A tensor mode as a picture: which ranks hold which blocks of x, W and y in a product that expands and one that contracts.

    x [tokens, in]        W [in, out]          y [tokens, out]
    | 0 | 1 |             | 0 | 2 |            | 0 | 2 |
    | 2 | 3 |      x      | 1 | 3 |     =      | 1 | 3 |

A block has the numbers of its ranks, and a colour if one rank alone holds it. Colours are those of Okabe and Ito. W is drawn with
its inputs down, as it is multiplied; it is stored as (out, in).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.costs.product_plan import ProductPlan, product_plan
from meshwright.costs.scheme import Axes, Grid, MatrixAxes, Scheme, Spread
from meshwright.report.pictures.picture import EDGE, INK, MARGIN, Box, Picture, Shape, Text

COLOURS_OF_RANKS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#000000")
DARK = frozenset({"#0072b2", "#000000"})
SHARED, PAPER = "#e6e6e6", "#ffffff"
SIDE, SPACE, ROW_HEIGHT, LINE = 150, 62, 216, 2
"""The side of a matrix, the space between two, the height of a product with its texts, and the width of a line."""


def layout_picture(grid: Grid, scheme: Scheme, *, title: str) -> Picture:
    """Draws how the matrices of a mode lie on its ranks.

    Args:
        grid: The ranks of the mode, at most eight, so that every rank has a colour.
        scheme: Which axes cut what.
        title: A line at the top.

    Returns:
        The picture, for `to_svg` or `to_png`.
    """
    assert grid.ranks <= len(COLOURS_OF_RANKS)
    shapes: list[Shape] = [Text(MARGIN, MARGIN + 12, title, size=13, bold=True)]
    roles = (
        ("expand", scheme.residual, scheme.inner, scheme.expand),
        ("contract", scheme.inner, scheme.residual, scheme.contract),
    )
    top = MARGIN + 30.0
    for role, have, want, matrix in roles:
        shapes += _product(grid, role, have, want, matrix, top)
        top += ROW_HEIGHT
    width = 2 * MARGIN + 3 * SIDE + 2 * SPACE + 76
    legend = "a number is a rank; grey: several ranks hold the same block; [tokens cut by | features cut by]"
    shapes.append(Text(MARGIN, top + 4, legend, size=11))
    height = top + 4 + MARGIN
    return Picture(width, height, (Box(0, 0, width, height, PAPER), *shapes))


def _product(grid: Grid, role: str, have: Spread, want: Spread, matrix: MatrixAxes, top: float) -> Iterator[Shape]:
    yield Text(MARGIN, top + SIDE / 2 + 14, role, size=12, bold=True)
    rows = [(*spread.rows, *spread.sequence) for spread in (have, want)]
    matrices = (
        ("x: tokens, features", rows[0], have.features),
        ("W: in, out", matrix.into, matrix.out),
        ("y: tokens, features", rows[1], want.features),
    )
    left = MARGIN + 72.0
    for number, (name, down, across) in enumerate(matrices):
        yield Text(left, top + 6, f"{name}  [{_axes(grid, down)} | {_axes(grid, across)}]", size=10)
        yield from _matrix(grid, down, across, left, top + 14)
        if number < 2:
            yield Text(
                left + SIDE + SPACE / 2, top + 14 + SIDE / 2 + 6, "\u00d7" if number == 0 else "=", anchor="middle", size=20
            )
        left += SIDE + SPACE
    yield Text(MARGIN + 72, top + SIDE + 34, _moves(grid, product_plan(have, want, matrix)), size=11)


def _axes(grid: Grid, axes: Axes) -> str:
    return " > ".join(axis for axis in axes if grid.size((axis,)) > 1) or "-"


def _matrix(grid: Grid, down: Axes, across: Axes, left: float, top: float) -> Iterator[Shape]:
    """The blocks of a matrix on a dark background, which shows as lines between them."""
    counts = grid.size(down), grid.size(across)
    yield Box(left, top, SIDE, SIDE, EDGE)
    holders: dict[tuple[int, int], list[int]] = {}
    for rank in range(grid.ranks):
        holders.setdefault((_index(grid, rank, down), _index(grid, rank, across)), []).append(rank)
    height, width = (SIDE - LINE) / counts[0], (SIDE - LINE) / counts[1]
    for (i, j), ranks in sorted(holders.items()):
        fill = COLOURS_OF_RANKS[ranks[0]] if len(ranks) == 1 else SHARED
        x, y = left + LINE + j * width, top + LINE + i * height
        text = ", ".join(map(str, ranks)) if len(ranks) < 4 else f"{ranks[0]} to {ranks[-1]}"
        yield Box(x, y, width - LINE, height - LINE, fill, f"ranks {text}")
        ink = PAPER if fill in DARK else INK
        yield Text(x + (width - LINE) / 2, y + (height - LINE) / 2 + 4, text, anchor="middle", size=11, fill=ink)


def _index(grid: Grid, rank: int, axes: Axes) -> int:
    at, found = grid.at(rank), 0
    for axis in axes:
        found = found * grid.size((axis,)) + at[axis]
    return found


def _moves(grid: Grid, plan: ProductPlan) -> str:
    """The moves of a product in words."""
    wide = grid.wide
    parts = [f"gather x over {axis}" for _, axis in plan.input_gathers if wide((axis,))]
    parts += [f"gather W over {axis}" for _, axis in plan.weight_gathers if wide((axis,))]
    parts.append("multiply")
    parts += [f"scatter y over {axis}" for _, axis in plan.scatters if wide((axis,))]
    parts += [f"sum y over {axis}" for axis in wide(plan.total)]
    back = [f"backward: sum the gradient of x over {axis}" for axis in wide(plan.copy)]
    back += [f"once per step: sum the gradient of W over {axis}" for axis in wide(plan.unsummed)]
    return "; ".join([", ".join(parts), *back])
