"""Progress of a run: a bar and a status line on a terminal; elsewhere (for example in a batch job's log) plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status


class TerminalBar:
    """A progress bar over the steps, with a few numbers next to it."""

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
        """Sets the number of finished steps."""
        self.progress.update(self.task, completed=done)

    def say(self, numbers: Mapping[str, float]) -> None:
        """Shows these numbers."""
        self.numbers.update(numbers)
        self.progress.update(self.task, numbers="  ".join(number_text(name, value) for name, value in self.numbers.items()))

    def close(self) -> None:
        """Stops the bar and leaves it on the screen."""
        self.progress.stop()


class SearchBar:
    """A bar while a search runs, with what it has found so far. It disappears at the end; without a terminal there is none."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self.task = self.progress.add_task("", total=1.0)

    def at(self, done: float, found: str) -> None:
        """Shows which share of its work a search has done, and what it has found."""
        self.progress.update(self.task, completed=done, description=found)

    def __enter__(self) -> SearchBar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


class Stream(StrEnum):
    """Where lines are written."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Lines:
    """Writes lines at once. On a terminal it shows the running phase, and leaves logs to the bar."""

    def __init__(self, stream: Stream = Stream.STDOUT) -> None:
        self.stream = stream
        self._console = Console(stderr=True)
        self._status: Status | None = None

    @property
    def on_terminal(self) -> bool:
        """True if lines go to a terminal."""
        return self._file.isatty()

    def begin(self, phase: str) -> None:
        """Starts a phase."""
        self._stop()
        if self._console.is_terminal:
            self._status = self._console.status(f"{phase} ...")
            self._status.start()

    def end(self, phase: str, seconds: float | None) -> None:
        """Ends a phase. `seconds=None` means that it failed; the error is reported elsewhere."""
        self._stop()
        if seconds is not None:
            self.write(f"{phase}: {seconds:.1f} s")

    def log(self, step: int, total: int, numbers: Mapping[str, object]) -> None:
        """Writes the logged numbers of a step."""
        shown = [number_text(name, value) for name, value in numbers.items() if isinstance(value, int | float)]
        self.write("  ".join([f"step {step}/{total}", *shown]))

    def write(self, line: str) -> None:
        """Writes a line and flushes."""
        print(line, file=self._file, flush=True)

    @property
    def _file(self) -> TextIO:
        return sys.stdout if self.stream is Stream.STDOUT else sys.stderr

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def number_text(name: str, value: float) -> str:
    """Returns a logged number with its name, or with its unit if it is a speed."""
    if name.endswith("_per_second"):
        return f"{value:,.0f} {name.removesuffix('_per_second').replace('_', ' ')}/s"
    return f"{name} {value:.3e}" if value and abs(value) < 1e-3 else f"{name} {value:.4g}"


def size_text(size: float) -> str:
    """Returns bytes with a suitable unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
