"""Files and terminals that the verbs read from and write to."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import typer

from meshwright.errors import MeshwrightError


def read(path: Path) -> str:
    """The text of a file that a user named."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot read {path}: {error}") from error


def refuse_output(path: Path | None) -> None:
    """Raise if a file cannot be written, before the work that it is for; what it holds by now stays as it is."""
    if path is None:
        return
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: to open it would take its reader away
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot write {path}: {error}", fix="a file in a folder that exists") from error


def write(path: Path, text: str) -> None:
    """Write an output that a user asked for."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot write {path}: {error}") from error


def give(text: str, output: Path | None) -> None:
    """Print an answer, or write it to the file that was asked for."""
    if output is None:
        typer.echo(text.rstrip("\n"), color=True)
    else:
        write(output, text.rstrip("\n") + "\n")


def width() -> int:
    """Columns to draw in: those of the terminal, or COLUMNS, or 120."""
    return shutil.get_terminal_size((120, 24)).columns


def coloured() -> bool:
    """Does the output take colours? A terminal does, unless NO_COLOR is set; FORCE_COLOR gives them to anything."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")
