"""One attribute in the place of another, for the time of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Let an attribute of a class or module be another, and be as it was in the end, inherited or its own."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
