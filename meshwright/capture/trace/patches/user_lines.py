"""Finds lines of a user's model: those outside of torch and of this package."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[2])


def is_users(file: str) -> bool:
    """True if a file belongs neither to torch nor to the code that traces."""
    return not file.startswith((_TORCH, _OWN, "<"))


def line(file: str, number: int, function: str) -> str:
    """Format a line for an error, with its source text if there is any."""
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}, in {function}{': ' if text else ''}{text}"


def asking() -> str:
    """Return the line of the model that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown line" if frame is None else line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def last(traceback: TracebackType | None) -> str:
    """Return the innermost line of the model in a traceback, or an empty string."""
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_users(code.co_filename):
            found = line(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found
