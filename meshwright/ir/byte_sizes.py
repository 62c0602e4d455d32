"""Sizes, rates, speeds and times as people write them: 2GB, 512 MiB, 25 GB/s, 312 TFLOPS, 5 us."""

from __future__ import annotations

import re
from collections.abc import Callable

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]B|[KMG]iB)", re.IGNORECASE)


def bytes_in(text: str) -> float | None:
    """Returns a size such as 2GB or 512 MiB in bytes; None if the text is not a size with a unit."""
    size = _SIZE.fullmatch(text.strip())
    return float(size[1]) * _UNITS[size[2].upper()] if size else None


_SCALE = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SECONDS = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}
_MEASURE = re.compile(r"(\d+(?:\.\d+)?)\s*(\S+)")
_SPEED = re.compile(r"([kKMGTP]?)(?:FLOPS|FLOP/s|Flops|Flop/s|flops|flop/s)")
_RATE = re.compile(r"([kKMGT]?)(B|bit)/s")


def rate_in(text: str) -> float | None:
    """Returns a rate such as 25 GB/s or 200 Gbit/s in bytes per second. 200 Gb/s could mean both and is None."""
    return _measured(text, _RATE, lambda unit: _SCALE[unit[1]] / (8 if unit[2] == "bit" else 1))


def flops_in(text: str) -> float | None:
    """Returns a speed such as 312 TFLOPS in operations per second; None if the text is not a speed with a unit."""
    return _measured(text, _SPEED, lambda unit: _SCALE[unit[1]])


def seconds_in(text: str) -> float | None:
    """Returns a time such as 5 us in seconds; None if the text is not a time with a unit."""
    found = _MEASURE.fullmatch(text.strip())
    return float(found[1]) / _SECONDS[found[2]] if found and found[2] in _SECONDS else None


def _measured(text: str, units: re.Pattern[str], scale: Callable[[re.Match[str]], float]) -> float | None:
    found = _MEASURE.fullmatch(text.strip())
    unit = units.fullmatch(found[2]) if found else None
    return float(found[1]) * scale(unit) if found and unit else None
