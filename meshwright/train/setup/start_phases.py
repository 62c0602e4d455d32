"""The phases of a start: capture, cut, check, schedule, start workers, set up ranks, first step.

A callback that has `on_phase_begin(name)` and `on_phase_end(name, seconds)` is told of them, on the rank that speaks for all;
`seconds` is None where a phase has failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic


@contextmanager
def phase(callbacks: Iterable[object], name: str) -> Iterator[None]:
    """Tell callbacks that a phase begins, and how long it took."""
    heard = list(callbacks)
    _tell(heard, "on_phase_begin", name)
    begun = monotonic()
    try:
        yield
    except BaseException:
        _tell(heard, "on_phase_end", name, None)
        raise
    _tell(heard, "on_phase_end", name, monotonic() - begun)


def _tell(callbacks: Iterable[object], event: str, *given: object) -> None:
    for callback in callbacks:
        if (told := getattr(callback, event, None)) is not None:
            told(*given)
