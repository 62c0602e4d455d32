"""Limits for input files: reading any file ends quickly, and its values can be printed, copied and used.

JSON and TOML parsers accept nesting up to the interpreter's stack, integers that cannot be printed, texts that no file name
or terminal accepts, and keys whose cost grows with the square of their length. This file rejects such input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

DEPTH = 64
"""The most tables and lists inside each other."""

PARTS = 64
"""The most parts of a dotted key."""

CHARACTERS = 100_000_000
"""The most characters of a plan, job or model file."""

_LARGEST = 10**1000
_QUOTED = re.compile(
    r'"""(?:\\.?|[^\\])*?(?:"""|\Z)|"(?:\\[^\n]?|[^"\\\n])*"?' + r"|'''.*?(?:'''|\Z)|'[^'\n]*'?|#[^\n]*", re.DOTALL
)
"""Strings and comments, also unterminated ones. Every opening quote matches, so the search takes one pass over the text."""
_BETWEEN = re.compile(r"[\n=\[\]{},]+")
_UNFIT = re.compile("[\0\ud800-\udfff]")


def file_text(path: Path, what: str, *, fix: str | None = None) -> str:
    """Returns the text of a file. Stops reading and raises if the file is too long."""
    try:
        with path.open(encoding="utf-8") as file:
            found = file.read(CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot read {what} {str(path)[:200]}: {error}", fix=fix) from error
    if len(found) > CHARACTERS:
        raise MeshwrightError(f"{what} {path} has more than {CHARACTERS} characters", fix=fix)
    return found


def toml(text: str, what: str) -> dict[str, Any]:
    """Parses TOML; `what` names the expected content in errors."""
    import tomllib

    if any(key.count(".") >= PARTS for key in _BETWEEN.split(_QUOTED.sub("", text))):
        raise MeshwrightError(f"{what} has a key of more than {PARTS} parts", fix="nest tables: [a.b]")
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(f"{what} is not TOML: {str(error)[:200]}") from error
    refuse_unfit(found, what)
    return found


def refuse_unfit(value: Any, what: str) -> None:
    """Raises if data is nested too deeply, or if it contains numbers or texts that cannot be used."""
    if (why := _unfit(value)) is None:
        return
    keys = value if isinstance(value, Mapping) else ()
    key = next((key for key in keys if isinstance(key, str) and not _unfit(key) and _unfit(value[key])), None)
    place = what if key is None else f"'{key[:80]}' of {what}"
    raise MeshwrightError(f"{place} has {why}", fix="see the documentation for the format of this file")


def _unfit(value: Any) -> str | None:
    """Returns what is wrong with a value or with something inside it, or None."""
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > DEPTH:
            return f"more than {DEPTH} tables and lists inside each other"
        inside: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if _UNFIT.search(one):
                    return f"the text {one[:40]!r}, with an invalid character"
            elif isinstance(one, int):
                if not -_LARGEST < one < _LARGEST:
                    return "a whole number that is too large"
            elif isinstance(one, Mapping):
                inside += one.keys()
                inside += one.values()
            elif isinstance(one, list | tuple):
                inside += one
        level = inside
    return None


def shown(value: Any) -> str:
    """Returns a value as a short text for an error, however large it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a number that is too large"
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):  # a number in it has too many digits, or it is nested too deeply
        return f"a {type(value).__name__} that is too large"
