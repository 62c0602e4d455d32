"""What really happened: begin and end of every entry of a walk, on one clock for all ranks; off unless asked for."""

from __future__ import annotations

from time import perf_counter

from meshwright.runtime.program import Step


class Trace:
    """Times of the steps of one rank, as they come."""

    def __init__(self) -> None:
        self.times: list[tuple[Step, float, float]] = []
        self._start = 0.0

    def begin(self) -> None:
        """A step starts."""
        self._start = perf_counter()

    def end(self, step: Step) -> None:
        """It ends."""
        self.times.append((step, self._start, perf_counter()))
