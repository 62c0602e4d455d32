"""Sizes as people write them: 2GB, 512 MiB."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]B|[KMG]iB)", re.IGNORECASE)


def bytes_in(text: str) -> float | None:
    """Returns a size such as 2GB or 512 MiB in bytes; None if the text is not a size with a unit."""
    size = _SIZE.fullmatch(text.strip())
    return float(size[1]) * _UNITS[size[2].upper()] if size else None
