"""Draw the pictures of the README and the docs: `make pictures`. Each is one command that users can type."""

from __future__ import annotations

import shlex
from pathlib import Path

from meshwright.cli.main import app

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


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Write one picture as SVG and return its file."""
    path = folder / f"{name}.svg"
    app([*shlex.split(PICTURES[name]), "--format", "svg", "-o", str(path)], standalone_mode=False)
    return path


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PICTURES:
        print(draw(name))
