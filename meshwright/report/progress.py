"""How a run goes on: a bar and a wait on a terminal; elsewhere, as in the log of a batch job, lines as they come."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status


class TerminalBar:
    """Steps done of all, with a few numbers beside."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.progress.disable = not self.progress.console.is_terminal
        self.task = self.progress.add_task("training", total=total, completed=done, numbers="")
        self.numbers: dict[str, float] = {}
        self.progress.start()

    def at(self, done: int) -> None:
        """So many steps are done."""
        self.progress.update(self.task, completed=done)

    def say(self, numbers: Mapping[str, float]) -> None:
        """Show these numbers."""
        self.numbers.update(numbers)
        self.progress.update(self.task, numbers="  ".join(number_text(name, value) for name, value in self.numbers.items()))

    def close(self) -> None:
        """Leave it as it is."""
        self.progress.stop()


class Stream(StrEnum):
    """Where lines go."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Lines:
    """Lines that are written at once; on a terminal a phase is shown while it lasts, and logs are left to the bar."""

    def __init__(self, stream: Stream = Stream.STDOUT) -> None:
        self.stream = stream
        self._console = Console(stderr=True)
        self._status: Status | None = None

    @property
    def on_terminal(self) -> bool:
        """Do lines go to a terminal?"""
        return self._file.isatty()

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._stop()
        if self._console.is_terminal:
            self._status = self._console.status(f"{phase} ...")
            self._status.start()

    def end(self, phase: str, seconds: float | None) -> None:
        """It is over; None: it has failed, and somebody else says why."""
        self._stop()
        if seconds is not None:
            self.write(f"{phase}: {seconds:.1f} s")

    def log(self, step: int, total: int, numbers: Mapping[str, object]) -> None:
        """Numbers of a step, as they are logged."""
        shown = [number_text(name, value) for name, value in numbers.items() if isinstance(value, int | float)]
        self.write("  ".join([f"step {step}/{total}", *shown]))

    def write(self, line: str) -> None:
        """A line, now."""
        print(line, file=self._file, flush=True)

    @property
    def _file(self) -> TextIO:
        return sys.stdout if self.stream is Stream.STDOUT else sys.stderr

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def number_text(name: str, value: float) -> str:
    """A number of a log with its name, or with its unit where it is a speed."""
    if name.endswith("_per_second"):
        return f"{value:,.0f} {name.removesuffix('_per_second').replace('_', ' ')}/s"
    return f"{name} {value:.3e}" if value and abs(value) < 1e-3 else f"{name} {value:.4g}"


def size_text(size: float) -> str:
    """Bytes in the unit in which they have few digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
