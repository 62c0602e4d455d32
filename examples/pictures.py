"""Draw the pictures of the README and the docs: `make pictures`. Schedules are commands that users can type.

The last pictures are of real runs (`examples/cyclic_runs.py`), so their times differ a little each time.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from meshwright.cli._verbs import command_line
from meshwright.costs.modes import mode
from meshwright.costs.scheme import TensorRequest
from meshwright.report.pictures.layout_picture import layout_picture
from meshwright.report.pictures.svg import to_svg

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"

PICTURES = {
    "chimera": "show chimera -w 4 -n 4",
    "chimera-halving": "show chimera -w 4 -n 8 --option mode=halving",
    "gpipe": "show gpipe -w 4 -n 8",
    "onef1b": "show onef1b -w 4 -n 8",
    "interleaved": "show interleaved -w 4 -n 8",
    "zero-bubble": "show zero_bubble -w 4 -n 8 --option variant=h2",
    "zbv": "show zbv -w 4 -n 8",
    "hanayo": "show hanayo -w 4 -n 8 --option waves=2",
    "dualpipe": "show dualpipe -w 4 -n 8",
    "shifted": "show shifted -w 4 -n 8 --recompute-cost 1",
    "cyclic": "show cyclic -w 4 -n 4",
    "pipedream-2bw": "show pipedream_2bw -w 4 -n 8",
    "listed": "show listed -w 4 -n 8 --send 0.5",
}
"""File name and command, without the format and the output."""

LAYOUTS = {
    "tensor-line": ("line", TensorRequest(tp=4), "line (1-D): 4 ranks"),
    "tensor-line-sequence": ("line", TensorRequest(tp=4, sequence=True), "line with sequence=True: 4 ranks"),
    "tensor-grid": ("grid", TensorRequest(tp=4), "grid (2-D): 2 x 2 ranks"),
    "tensor-tesseract": ("tesseract", TensorRequest(tp=8, depth=2), "tesseract (2.5-D): 2 x 2 x 2 ranks, depth 2"),
    "tensor-box": ("box", TensorRequest(box=(2, 2, 2)), "box (3-D): w = 2, a = 2, b = 2"),
}
"""File name, and the tensor mode whose layout is drawn, with a title."""


def draw_layout(name: str, folder: Path = FOLDER) -> Path:
    """Write the layout of a tensor mode as SVG and return its file."""
    mode_name, asked, title = LAYOUTS[name]
    grid = mode(mode_name).grid(asked)
    path = folder / f"{name}.svg"
    path.write_text(to_svg(layout_picture(grid, mode(mode_name).scheme(grid), title=title)))
    return path


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Write one picture as SVG and return its file."""
    path = folder / f"{name}.svg"
    command_line()([*shlex.split(PICTURES[name]), "--format", "svg", "-o", str(path)], standalone_mode=False)
    return path


if __name__ == "__main__":
    from examples.cyclic_runs import draw_runs

    FOLDER.mkdir(exist_ok=True)
    for name in PICTURES:
        print(draw(name))
    for name in LAYOUTS:
        print(draw_layout(name))
    for path in draw_runs(FOLDER):
        print(path)
