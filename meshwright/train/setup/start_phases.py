"""The start-up phases: capture, cut, check, schedule, start workers, set up ranks, first step.

On rank 0 each phase calls `on_phase_begin(name)` and `on_phase_end(name, seconds)` of every callback that has these methods.
`seconds` is None if the phase failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic


@contextmanager
def phase(callbacks: Iterable[object], name: str) -> Iterator[None]:
    """Notifies callbacks of the begin and the end of a phase."""
    listeners = list(callbacks)
    _notify(listeners, "on_phase_begin", name)
    begun = monotonic()
    try:
        yield
    except BaseException:
        _notify(listeners, "on_phase_end", name, None)
        raise
    _notify(listeners, "on_phase_end", name, monotonic() - begun)


def _notify(callbacks: Iterable[object], event: str, *given: object) -> None:
    for callback in callbacks:
        if (method := getattr(callback, event, None)) is not None:
            method(*given)
