"""Draws a picture as PNG with matplotlib (`pip install 'meshwright[plot]'`)."""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.report.pictures.picture import Area, Box, Picture, Shape, Text

ALIGN = {"start": "left", "middle": "center", "end": "right"}


def to_png(picture: Picture, *, scale: float = 2.0) -> bytes:
    """Returns the PNG of a picture, with `scale` pixels for each of its pixels.

    Raises:
        MeshwrightError: matplotlib is not installed.
    """
    try:
        figures, patches = import_module("matplotlib.figure"), import_module("matplotlib.patches")
    except ImportError as error:
        raise MeshwrightError(
            "a PNG needs matplotlib, which is not installed", fix="pip install 'meshwright[plot]', or --format svg"
        ) from error
    figure = figures.Figure(figsize=(picture.width / 100, picture.height / 100), dpi=100 * scale)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")
    for shape in picture.shapes:
        _draw(axes, patches, shape)
    found = BytesIO()
    figure.savefig(found, format="png")
    return found.getvalue()


def _draw(axes: Any, patches: Any, shape: Shape) -> None:
    match shape:
        case Box():
            axes.add_patch(patches.Rectangle((shape.x, shape.y), shape.width, shape.height, color=shape.fill, linewidth=0))
        case Area():
            axes.add_patch(patches.Polygon(shape.points, color=shape.fill, linewidth=0))
        case Text():
            look = {"color": shape.fill, "fontsize": shape.size * 0.72, "weight": "bold" if shape.bold else "normal"}
            axes.text(shape.x, shape.y, shape.text, ha=ALIGN[shape.anchor], va="baseline", **look)
