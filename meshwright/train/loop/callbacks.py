"""The callbacks of a run: when to log, evaluate and save, a progress bar, a JSON Lines log, and the user's own callbacks."""

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
"""The log file in output_dir."""

_BESIDE = ("loss", "eval_loss", "tokens_per_second", "samples_per_second")
"""Log entries that are shown next to the progress bar."""

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class JsonLines(TrainerCallback):
    """Writes every log as one line of JSON to a file in output_dir."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Starts a new file for a new run. A resumed run appends to the existing file."""
        if state.is_world_process_zero:
            path = Path(args.output_dir, LOG)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not state.global_step:
                path.write_text("")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Appends one line."""
        if state.is_world_process_zero and logs:
            finite = {k: v if not isinstance(v, float) or isfinite(v) else str(v) for k, v in logs.items()}
            path = Path(args.output_dir, LOG)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **finite}) + "\n")


class ProgressBar(TrainerCallback):
    """A progress bar on rank 0 with the number of steps, the last loss and the remaining time."""

    def __init__(self) -> None:
        self.bar: TerminalBar | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Shows the bar."""
        if state.is_world_process_zero:
            self.bar = TerminalBar(state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Advances the bar by one step."""
        if self.bar is not None:
            self.bar.at(state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Shows the last loss and the speed next to the bar."""
        if self.bar is not None and logs:
            self.bar.say({key: logs[key] for key in _BESIDE if key in logs})

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Closes the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class TextLines(TrainerCallback):
    """Prints start-up phases and logs as lines of text. The caller prints the summary at the end of the run."""

    def __init__(self, stream: Stream = Stream.STDOUT) -> None:
        self.stream, self.training = stream, False
        self._lines: Lines | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lines": None}  # every process opens its own writer

    @property
    def lines(self) -> Lines:
        """The writer of this process."""
        self._lines = self._lines or Lines(self.stream)
        return self._lines

    def on_phase_begin(self, name: str) -> None:
        """Prints the start of a phase. During training the terminal shows the progress bar instead."""
        if not self.training:
            self.lines.begin(name)

    def on_phase_end(self, name: str, seconds: float | None) -> None:
        """Prints the duration of a phase, or that it failed."""
        if not self.training or not self.lines.on_terminal:
            self.lines.end(name, seconds)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remembers that the training steps have begun."""
        self.training = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Prints a log, unless the progress bar shows it. The last log of a run is the summary and is not printed."""
        shown_by_bar = self.lines.on_terminal and not args.disable_tqdm
        if state.is_world_process_zero and logs and "train_runtime" not in logs and not shown_by_bar:
            self.lines.log(state.global_step, state.max_steps, logs)


class RunCallbacks:
    """All callbacks of a run. A user's callback may decide differently on each rank, so all ranks follow rank 0."""

    def __init__(self, own: list[TrainerCallback], report_to: list[str], *, bar: bool, folder: Path, **passed: Any) -> None:
        """TensorBoard writes its files to `folder`, unless its environment variable names another one."""
        made = reporters(report_to)
        self._boards = [callback for callback in made if isinstance(callback, TensorBoardCallback)]
        for board in self._boards:
            board.logging_dir = board.logging_dir or str(folder)
        ours = [DefaultFlowCallback(), JsonLines(), *([ProgressBar()] if bar else [])]
        self.handler = CallbackHandler([*ours, *made, *own], **passed)
        self.has_own = any(not isinstance(callback, TextLines) for callback in own)
        self.control = TrainerControl()

    def __call__(self, event: str, args: Any, state: TrainerState, **more: Any) -> TrainerControl:
        """Calls the method `event` of all callbacks."""
        self.control = getattr(self.handler, event)(args, state, self.control, **more)
        return self.control

    def close(self) -> None:
        """Closes TensorBoard's files, which otherwise stay open until training ends."""
        for board in self._boards:
            if board.tb_writer is not None:
                board.tb_writer.close()
                board.tb_writer = None

    def states(self) -> dict[str, list[Any]]:
        """Returns the states that callbacks store in a checkpoint, by class name."""
        found: dict[str, list[Any]] = {}
        for callback in self.handler.callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return found

    def restore(self, states: Mapping[str, list[Any]]) -> None:
        """Restores the states of callbacks of the same classes."""
        for kind, kept in states.items():
            mine = [c for c in self.handler.callbacks if type(c).__name__ == kind]
            for callback, state in zip(mine, kept, strict=False):
                callback.__dict__.update(type(callback).from_state(state).__dict__)

    def follow_rank_zero(self) -> TrainerControl:
        """Copies the control flags of rank 0 to all ranks. Called after every event that may change the flags."""
        if self.has_own and dist.get_world_size() > 1:
            flags = torch.tensor([getattr(self.control, name) for name in _FLAGS], dtype=torch.uint8)
            dist.broadcast(flags, src=0)
            for name, flag in zip(_FLAGS, flags.tolist(), strict=True):
                setattr(self.control, name, bool(flag))
        return self.control
