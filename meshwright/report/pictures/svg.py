"""Writes a picture as SVG text, without any library; browsers, papers and README files can show it."""

from __future__ import annotations

from html import escape

from meshwright.report.pictures.picture import Area, Box, Picture, Shape, Text

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


def to_svg(picture: Picture) -> str:
    """Returns the SVG text of a picture; spans have their action and times as tooltips."""
    size = f'width="{picture.width:g}" height="{picture.height:g}" viewBox="0 0 {picture.width:g} {picture.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">'
    return "\n".join([head, *map(_element, picture.shapes), "</svg>\n"])


def _element(shape: Shape) -> str:
    match shape:
        case Box():
            place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
            end = f"><title>{escape(shape.title)}</title></rect>" if shape.title else "/>"
            return f'<rect {place} fill="{shape.fill}"{end}'
        case Area():
            points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
            return f'<polygon points="{points}" fill="{shape.fill}"/>'
        case Text():
            weight = ' font-weight="bold"' if shape.bold else ""
            look = f'font-size="{shape.size}" text-anchor="{shape.anchor}" fill="{shape.fill}"{weight}'
            return f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" {look}>{escape(shape.text)}</text>'
