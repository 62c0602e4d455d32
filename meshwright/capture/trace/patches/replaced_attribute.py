"""Replaces one attribute for the duration of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Replace an attribute of a class or module and restore it at the end, also if it was inherited."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
