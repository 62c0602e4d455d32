"""A progress bar in the terminal; where there is none, nothing is drawn."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
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
        self.progress.update(self.task, numbers="  ".join(f"{name} {value:.3f}" for name, value in self.numbers.items()))

    def close(self) -> None:
        """Leave it as it is."""
        self.progress.stop()
