"""Limits of what is read: whatever a file holds, reading it ends at once, and what comes out can be shown, copied and used.

Parsers of JSON and TOML take nesting up to the interpreter's stack, integers that cannot be printed, texts that no file name
or terminal takes, and keys whose cost grows with the square of their length. Such input is refused here, by its kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

DEPTH = 64
"""So many tables and lists inside each other."""

PARTS = 64
"""So many parts of a dotted key."""

CHARACTERS = 100_000_000
"""No file of a plan, a job or a model is longer."""

_LARGEST = 10**1000
_QUOTED = re.compile(
    r'"""(?:\\.?|[^\\])*?(?:"""|\Z)|"(?:\\[^\n]?|[^"\\\n])*"?' + r"|'''.*?(?:'''|\Z)|'[^'\n]*'?|#[^\n]*", re.DOTALL
)
"""Texts and comments, also those without an end: whatever begins is matched, so the time is that of one pass."""
_BETWEEN = re.compile(r"[\n=\[\]{},]+")
_UNFIT = re.compile("[\0\ud800-\udfff]")


def file_text(path: Path, what: str, *, fix: str | None = None) -> str:
    """The text of a file, which is not read to its end where that is too far away."""
    try:
        with path.open(encoding="utf-8") as file:
            found = file.read(CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot read {what} {str(path)[:200]}: {error}", fix=fix) from error
    if len(found) > CHARACTERS:
        raise MeshwrightError(f"{what} {path} has more than {CHARACTERS} characters", fix=fix)
    return found


def toml(text: str, what: str) -> dict[str, Any]:
    """The TOML in a text; `what` says in errors what was expected there."""
    import tomllib

    if any(key.count(".") >= PARTS for key in _BETWEEN.split(_QUOTED.sub("", text))):
        raise MeshwrightError(f"{what} has a key of more than {PARTS} parts", fix="tables inside tables: [a.b]")
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(f"{what} is not TOML: {str(error)[:200]}") from error
    refuse_unfit(found, what)
    return found


def refuse_unfit(value: Any, what: str) -> None:
    """Refuse data that is nested too deeply, and numbers and texts in it that cannot be used."""
    if (why := _unfit(value)) is None:
        return
    keys = value if isinstance(value, Mapping) else ()
    key = next((key for key in keys if isinstance(key, str) and not _unfit(key) and _unfit(value[key])), None)
    place = what if key is None else f"'{key[:80]}' of {what}"
    raise MeshwrightError(f"{place} has {why}", fix="what the documentation shows for such a file")


def _unfit(value: Any) -> str | None:
    """What is wrong with a value or something inside it."""
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > DEPTH:
            return f"more than {DEPTH} tables and lists inside each other"
        inside: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if _UNFIT.search(one):
                    return f"the text {one[:40]!r}, with a character that is none"
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
    """A value in an error text, however large it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a number that is too large"
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):  # a number inside it has too many digits, or it is nested too deeply
        return f"a {type(value).__name__} that is too large"
