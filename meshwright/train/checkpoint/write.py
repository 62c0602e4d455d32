"""Checkpoints that do not depend on the plan: written under one plan, resumed under any other.

    checkpoints = Checkpoints("out", engine, limit=3)
    found = checkpoints.resume()                   the last good one, or None
    checkpoints.save(step, data=sampler.state())   returns when the state is copied; a thread writes it
    checkpoints.close()                            waits for the last one

Tensors are written as safetensors, each by one of the ranks that hold it. Weights have their own names, with an index and the
model's configuration, so that `from_pretrained` reads the folder. torch.distributed.checkpoint writes the other tensors. Numbers
are JSON.

All ranks must make each call together, between two walks of the schedule. Without a flush, this is after a drain: only
the newest version of each parameter exists then, and it is saved. An error in the thread is raised by the next call.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.json_exchange import broadcast_json
from meshwright.train.checkpoint import folder_lock
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.checkpoint import run_state as state
from meshwright.train.checkpoint.pretrained_weights import apart, name_optimizer_files, write_weights
from meshwright.train.checkpoint.restore import Resumed, restore
from meshwright.train.checkpoint.tensor_files import write_tensors
from meshwright.train.optimizer.optimizer_facts import facts, merged
from meshwright.train.setup.all_ranks import agree

SETTLE_S = 5.0
"""How many seconds a failed run waits for the checkpoint that is being written."""


@dataclass(frozen=True)
class _Job:
    """One checkpoint that is being written."""

    step: int
    folder: Path
    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    given: Mapping[str, Any]
    keep: Collection[Path]


@dataclass
class Checkpoints:
    """The checkpoints of a run in one folder. `limit` is how many are kept; None keeps all.

    `model` provides its configuration and the weights that no stage reads. `processing` is a tokenizer to save with it.
    """

    root: Path
    engine: Engine
    limit: int | None = None
    background: bool = True
    model: Any = None
    processing: Any = None
    _thread: threading.Thread | None = field(default=None, init=False)
    _failed: BaseException | None = field(default=None, init=False)
    _held: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        if self.limit is not None and self.limit < 1:
            raise MeshwrightError(f"a limit of {self.limit} checkpoints leaves none", fix="save_total_limit=1, or None")
        self._group = dist.new_group(backend="gloo")
        agree(self._prepare, group=self._group)

    def _prepare(self) -> None:
        if dist.get_rank() == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            if not folder_lock.held_by_another(self.root):  # another run may still be writing what looks abandoned
                rotate.tidy(self.root)

    def save(
        self,
        step: int,
        *,
        data: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: Collection[Path] = (),
    ) -> Path:
        """Save the state after `step` steps. `data` (the position in the data) and `extra` are saved as rank 0 passes them."""
        self.wait()
        if not self._held:
            agree(lambda: folder_lock.take(self.root) if dist.get_rank() == 0 else None, group=self._group)
            self._held = True
        scaler = self.engine.scaler
        given = {"data": data, "scaler": None if scaler is None else scaler.state_dict(), "extra": extra}
        _refuse(self.engine, given)
        token = broadcast_json(secrets.token_hex(4), group=self._group)
        folder = self.root / f"{rotate.name_of(step)}.tmp-{token}"
        weights, rest = apart(self.engine, state.snapshot(self.engine))
        job = _Job(step, folder, weights, rest, facts(self.engine), given, keep)
        if self.background:
            self._thread = threading.Thread(target=self._work, args=(job,), name=f"checkpoint {step}", daemon=True)
            self._thread.start()
        else:
            self._work(job)
            self.wait()
        return self.root / rotate.name_of(step)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises the error of its thread, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._failed) is not None:
            self._failed = None
            raise error

    def resume(self, which: str | Path | None = None) -> Resumed | None:
        """Load a checkpoint into the engine: the named one, or the last good one. Returns None if there is none."""
        self.wait()
        return restore(self.engine, self.root, None if which is None else Path(which), self._group)

    def settle(self) -> None:
        """Wait a short time after a failure, so that the checkpoint that is being written can be completed."""
        if self._thread is not None:
            self._thread.join(SETTLE_S)

    def close(self) -> None:
        """Wait for the last checkpoint, release the lock and destroy the process group."""
        try:
            self.wait()
        finally:
            if self._held and dist.get_rank() == 0:
                folder_lock.release(self.root)
            dist.destroy_process_group(self._group)

    # -- in the thread

    def _work(self, job: _Job) -> None:
        try:
            self._write(job)
        except BaseException as error:
            self._failed = error

    def _write(self, job: _Job) -> None:
        """Write, mark, rename and rotate. Each part succeeds on all ranks or fails on all."""
        group, lead = self._group, dist.get_rank() == 0
        try:
            agree(lambda: job.folder.mkdir() if lead else None, group=group)
            parts = agree(lambda: json.loads(json.dumps(job.facts)), group=group)  # converts keys and tuples as the file does
            unread = write_weights(job.folder, job.weights, self.model, self.processing, group)
            agree(lambda: _facts_file(job, self.engine, {**merged(parts), "unread": unread}) if lead else None, group=group)
            agree(lambda: write_tensors(job.folder, job.tensors, dist.get_rank()), group=group)
            agree(lambda: name_optimizer_files(job.folder) if lead else None, group=group)
            described = agree(lambda: _described(job.folder, dist.get_rank(), dist.get_world_size()), group=group)
            files = {name: about for part in described for name, about in part.items()}
            agree(lambda: self._finish(job, files) if lead else None, group=group)
        except (MeshwrightError, OSError) as error:  # the watchdog reports a lost rank
            if lead:
                shutil.rmtree(job.folder, ignore_errors=True)
            good = rotate.checkpoints(self.root)
            raise MeshwrightError(
                f"{rotate.name_of(job.step)} could not be written: {error}",
                fix=f"the last good one is {good[-1].name}" if good else "there is no earlier one; check that the disk has space",
            ) from error

    def _finish(self, job: _Job, files: dict[str, Any]) -> None:
        rotate.finish(job.folder, files, job.step)
        rotate.rotate(self.root, self.limit, job.keep)


def _described(folder: Path, share: int, shares: int) -> dict[str, Any]:
    """Flush this rank's share of the files to disk, and return what the marker stores about them."""
    found = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file())[share::shares]:
        rotate.sync(path)
        found[path.name] = rotate.describe(path)
    return found


def _facts_file(job: _Job, engine: Engine, known: dict[str, Any]) -> None:
    head = {"schema": rotate.SCHEMA, "step": job.step, "seed": engine.settings.seed, "written_under": _plan(engine)}
    rotate.write(job.folder / rotate.FACTS, {**head, **job.given, **known})


def _plan(engine: Engine) -> dict[str, Any]:
    """Return the plan of this run. It is only for human readers; no code reads it."""
    schedule, how = engine.schedule, engine.settings
    sizes = {"workers": schedule.workers, "stages": schedule.stages, "dp": how.copies, "tp": how.box}
    return {"schedule": schedule.name, **sizes}


def _refuse(engine: Engine, given: Mapping[str, Any]) -> None:
    if engine.executor.at is not None:
        raise MeshwrightError("a checkpoint was requested during a step", fix="save between two calls of run")
    for name, value in given.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise MeshwrightError(f"{name} cannot be saved as JSON: {error}", fix="use numbers, text, lists and dicts") from error
