"""Large matrices in two parts: some cases in `make test`, all of them in `make full`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int = 2, *, first: int = 0, several: bool = False) -> list[Any]:
    """Every so many-th case as it is, the others marked slow; `several` says that a case is a tuple of arguments."""
    return [case if (i - first) % every == 0 else slow(case, several=several) for i, case in enumerate(cases)]


def slow(case: Any, *, several: bool = False) -> Any:
    """A case for `make full` alone."""
    values: Sequence[Any] = case if several else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
