"""Reading and writing files, and writing to the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path

import typer

from meshwright.errors import MeshwrightError
from meshwright.ir.timeline import Timeline


class Format(StrEnum):
    """Output formats of a verb."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    PERFETTO = "perfetto"
    SVG = "svg"
    PNG = "png"


def read(path: Path) -> str:
    """Returns the text of a file that a user named."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot read {path}: {error}") from error


def refuse_output(path: Path | None) -> None:
    """Raises if a file cannot be written, before the work starts. Does not change an existing file."""
    if path is None:
        return
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: opening and closing it would end its reader
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot write {path}: {error}", fix="a file in a folder that exists") from error


def write(path: Path, text: str) -> None:
    """Writes an output that a user asked for."""
    _write(path, text.encode("utf-8"))


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot write {path}: {error}") from error


def refuse_binary(form: Format, output: Path | None) -> None:
    """Raises if a PNG would be printed."""
    if form is Format.PNG and output is None:
        raise MeshwrightError("a PNG needs a file to be written to", fix="-o picture.png, or --format svg")


def drawn(timeline: Timeline, form: Format) -> str | bytes:
    """Returns a timeline as a trace or a picture; loads libraries only when needed."""
    if form is Format.PERFETTO:
        from meshwright.report.perfetto import to_perfetto

        return to_perfetto(timeline)
    from meshwright.report.pictures.picture import picture

    if form is Format.SVG:
        from meshwright.report.pictures.svg import to_svg

        return to_svg(picture(timeline))
    if form is Format.PNG:
        from meshwright.report.pictures.png import to_png

        return to_png(picture(timeline))
    raise MeshwrightError(f"a timeline is not drawn as {form}", fix="--format svg, png or perfetto")


def give(text: str | bytes, output: Path | None) -> None:
    """Prints an answer, or writes it to the given file."""
    if isinstance(text, bytes):
        assert output is not None, "checked by refuse_binary"
        _write(output, text)
    elif output is None:
        typer.echo(text.rstrip("\n"), color=True)
    else:
        write(output, text.rstrip("\n") + "\n")


def width() -> int:
    """Returns the width to draw in: that of the terminal, or COLUMNS, or 120."""
    return shutil.get_terminal_size((120, 24)).columns


def coloured() -> bool:
    """True if the output takes colours: a terminal unless NO_COLOR is set, or anything with FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")
