"""What looks on while training runs: the flow of logging, evaluation and saving, a progress bar, and a log of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from meshwright.report.progress import Bar
from meshwright.train.usable import usable

LOG = "log.jsonl"
"""The file of the log inside output_dir."""

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
        self.bar: Bar | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Show it."""
        if state.is_world_process_zero:
            self.bar = Bar(state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One step further."""
        if self.bar is not None:
            self.bar.at(state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """The last loss beside it."""
        if self.bar is not None and logs:
            self.bar.say({key: logs[key] for key in ("loss", "eval_loss") if key in logs})

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take it down."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def reports(names: str | list[str] | None) -> list[type[TrainerCallback]]:
    """The callbacks of Hugging Face that report to these programs; one that nobody knows is refused."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    with _reporting(names):
        return get_reporting_integration_callbacks(list(names or ()))


def _reporting(names: object) -> AbstractContextManager[None]:
    return usable(f"report_to={names!r}", fix="report_to='none', or a program whose package is installed")


class Watchers:
    """All callbacks of a run. Those of a user may decide by anything, so what rank 0 decides holds for all."""

    def __init__(self, own: list[TrainerCallback], report_to: list[str], *, bar: bool, folder: Path, **seen: Any) -> None:
        """`folder` is where TensorBoard's files go, unless its environment variable names another."""
        kinds = reports(report_to)
        with _reporting(report_to):
            made = [kind() for kind in kinds]
        self._boards = [callback for callback in made if isinstance(callback, TensorBoardCallback)]
        for board in self._boards:
            board.logging_dir = board.logging_dir or str(folder)
        ours = [DefaultFlowCallback(), JsonLines(), *([ProgressBar()] if bar else [])]
        self.handler = CallbackHandler([*ours, *made, *own], **seen)
        self.own = bool(own)
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
