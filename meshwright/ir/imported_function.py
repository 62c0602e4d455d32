"""Import a function that a user names as `package.module:function`, relative to the current folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import Any

from meshwright.errors import MeshwrightError


def function(name: str) -> Callable[..., Any]:
    """Returns the function. If the import of its module raises, the error shows the traceback of the user's own lines."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module, _, attribute = name.partition(":")
    fix = "package.module:function, seen from here"
    if not module or not attribute or module.startswith("."):
        raise MeshwrightError(f"cannot import {name[:200]}: it does not name a module and a function", fix=fix)
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, RecursionError) as error:
        raise MeshwrightError(f"cannot import {name[:200]}: {str(error)[:500]}", fix=fix) from error
    except (Exception, SystemExit) as error:
        where = "".join(format_exception(type(error), error, own_frames(error.__traceback__))).rstrip()
        raise MeshwrightError(f"{module} raised {type(error).__name__} while it was imported: {error}\n{where}") from error
    if not callable(found):
        raise MeshwrightError(f"{name} is not a function but {type(found).__name__}")
    made: Callable[..., Any] = found
    return made


def own_frames(frames: TracebackType | None, *ours: str) -> TracebackType | None:
    """Returns the traceback from the first frame of the user's code on. Skips frames of the import system and of `ours`."""
    before = (__file__, "<frozen importlib._bootstrap", sys.modules["importlib"].__file__ or "", *ours)
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(before):
        frames = frames.tb_next
    return frames
