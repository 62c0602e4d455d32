"""What looks on while training runs: the flow of logging, evaluation and saving, a progress bar, and a log of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from meshwright.report.progress import Lines, Stream, TerminalBar
from meshwright.train.loop.report_to import reporters

LOG = "log.jsonl"
"""The file of the log inside output_dir."""

_BESIDE = ("loss", "eval_loss", "tokens_per_second", "samples_per_second")
"""What stands beside the bar."""

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class JsonLines(TrainerCallback):
    """Every log as one line of JSON in output_dir."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A new run starts a new file; one that goes on adds to it."""
        if state.is_world_process_zero:
            path = Path(args.output_dir, LOG)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not state.global_step:
                path.write_text("")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Add a line."""
        if state.is_world_process_zero and logs:
            finite = {k: v if not isinstance(v, float) or isfinite(v) else str(v) for k, v in logs.items()}
            path = Path(args.output_dir, LOG)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **finite}) + "\n")


class ProgressBar(TrainerCallback):
    """A bar on rank 0: steps, the last loss, and how long it will take."""

    def __init__(self) -> None:
        self.bar: TerminalBar | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Show it."""
        if state.is_world_process_zero:
            self.bar = TerminalBar(state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One step further."""
        if self.bar is not None:
            self.bar.at(state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """The last loss beside it."""
        if self.bar is not None and logs:
            self.bar.say(
                {key: logs[key] for key in ("loss", "eval_loss", "tokens_per_second", "samples_per_second") if key in logs}
            )

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take it down."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class ShownLines(TrainerCallback):
    """Start-up phases and logs as lines, for whoever reads along; the end is left to who has asked for them."""

    def __init__(self, stream: Stream = Stream.STDOUT) -> None:
        self.stream, self.trains = stream, False
        self._lines: Lines | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lines": None}  # every process writes for itself

    @property
    def lines(self) -> Lines:
        """What writes in this process."""
        self._lines = self._lines or Lines(self.stream)
        return self._lines

    def on_phase_begin(self, name: str) -> None:
        """A phase of the start begins; while training the bar stands on the terminal."""
        if not self.trains:
            self.lines.begin(name)

    def on_phase_end(self, name: str, seconds: float | None) -> None:
        """It is over, or has failed."""
        if not self.trains or not self.lines.on_terminal:
            self.lines.end(name, seconds)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The first step follows."""
        self.trains = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """A line, unless the bar shows it; the last log of a run is its summary."""
        seen = self.lines.on_terminal and not args.disable_tqdm
        if state.is_world_process_zero and logs and "train_runtime" not in logs and not seen:
            self.lines.log(state.global_step, state.max_steps, logs)


class Watchers:
    """All callbacks of a run. Those of a user may decide by anything, so what rank 0 decides holds for all."""

    def __init__(self, own: list[TrainerCallback], report_to: list[str], *, bar: bool, folder: Path, **seen: Any) -> None:
        """`folder` is where TensorBoard's files go, unless its environment variable names another."""
        made = reporters(report_to)
        self._boards = [callback for callback in made if isinstance(callback, TensorBoardCallback)]
        for board in self._boards:
            board.logging_dir = board.logging_dir or str(folder)
        ours = [DefaultFlowCallback(), JsonLines(), *([ProgressBar()] if bar else [])]
        self.handler = CallbackHandler([*ours, *made, *own], **seen)
        self.own = any(not isinstance(callback, ShownLines) for callback in own)
        self.control = TrainerControl()

    def __call__(self, event: str, args: Any, state: TrainerState, **more: Any) -> TrainerControl:
        """Tell them of an event."""
        self.control = getattr(self.handler, event)(args, state, self.control, **more)
        return self.control

    def close(self) -> None:
        """Finish TensorBoard's files, which otherwise are open until training ends."""
        for board in self._boards:
            if board.tb_writer is not None:
                board.tb_writer.close()
                board.tb_writer = None

    def states(self) -> dict[str, list[Any]]:
        """What callbacks want a checkpoint to keep, by class."""
        found: dict[str, list[Any]] = {}
        for callback in self.handler.callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return found

    def restore(self, states: Mapping[str, list[Any]]) -> None:
        """Let callbacks of the same classes go on from there."""
        for kind, kept in states.items():
            mine = [c for c in self.handler.callbacks if type(c).__name__ == kind]
            for callback, state in zip(mine, kept, strict=False):
                callback.__dict__.update(type(callback).from_state(state).__dict__)

    def agree(self) -> TrainerControl:
        """After events that may change what comes next: all ranks go by rank 0."""
        if self.own and dist.get_world_size() > 1:
            flags = torch.tensor([getattr(self.control, name) for name in _FLAGS], dtype=torch.uint8)
            dist.broadcast(flags, src=0)
            for name, flag in zip(_FLAGS, flags.tolist(), strict=True):
                setattr(self.control, name, bool(flag))
        return self.control
