"""How runs end that nobody wanted to end so: Ctrl-C, a fork server that is killed, losses that are no numbers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.loop.loss_sums import LossSums
from meshwright.train.session.session import StepResult
from tests.support.paths import ROOT
from tests.support.trainers import gpt2, ours, text

NAN = float("nan")


def _hears_ctrl_c() -> None:
    """As in a terminal: what a shell starts in the background ignores it, and so would this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def begun(folder: Path, pp: int) -> subprocess.Popen[bytes]:
    flags = ["--pp", str(pp), "--max-steps", "100000", "--output-dir", str(folder / "out"), "--report-to", "none"]
    command = [sys.executable, "-m", "meshwright.cli.main", "train", "gpt-tiny", *flags, "--logging-steps", "1"]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            command, cwd=folder, stderr=said, stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=_hears_ctrl_c
        )


def interrupted(run: subprocess.Popen[bytes], folder: Path) -> str:
    """What is said after Ctrl-C, which all processes of a terminal hear; none of them is left a moment later."""
    os.killpg(run.pid, signal.SIGINT)
    try:
        run.wait(timeout=60)
        deadline = time.monotonic() + 60
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(run.pid, 0)
                time.sleep(0.1)
            pytest.fail("processes of the run are left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    said = (folder / "said").read_text()
    assert run.returncode == 130, f"{run.returncode}: {said}"
    return said


@pytest.mark.parametrize("pp", [1, 2])
def test_ctrl_c_ends_with_one_line(pp: int, tmp_path: Path) -> None:
    run = begun(tmp_path, pp)
    log = tmp_path / "out" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    said = interrupted(run, tmp_path)
    assert "Traceback" not in said and said.splitlines()[-1] == "interrupted"
    assert not (tmp_path / "out" / "run.lock").exists() or pp > 1, "one process lets go of its folder"


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [6, 7, 8, 9, 10, 11, 12])
def test_ctrl_c_while_a_run_starts(after_s: float, tmp_path: Path) -> None:
    run = begun(tmp_path, 2)
    time.sleep(after_s)
    assert "Traceback" not in interrupted(run, tmp_path)


@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_ctrl_c_while_the_verbs_are_imported(how: str, tmp_path: Path) -> None:
    """Inside an `exec`, as dataclasses use it, CPython would end by the signal and not with the exit code."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'meshwright.cli.schedules': {how}\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "meshwright.cli.main", "schedules"]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from meshwright import MeshwrightError
from meshwright.runtime.launch.workers import Workers

if __name__ == "__main__":
    try:
        Workers(2, preload=["killed_at_start"])
    except MeshwrightError as error:
        print(error)
    print(Workers(1).run(int, "7"))
"""


def test_a_fork_server_that_is_killed_is_named(tmp_path: Path) -> None:
    """The next workers get a new one."""
    once = tmp_path / "once"
    (tmp_path / "killed_at_start.py").write_text(
        f"import os, pathlib, signal\nonce = pathlib.Path({str(once)!r})\n"
        "if not once.exists():\n    once.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert "the server that local workers are forked from ended" in found.stdout, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "[7]", found.stderr[-2000:]


def result(step: int, loss: float) -> StepResult:
    return StepResult(step, loss, 1.0, 0.5, 0.1)


@pytest.mark.parametrize("filtered", [True, False])
def test_losses_that_are_no_numbers_are_counted(filtered: bool) -> None:
    losses = LossSums()
    for step, loss in enumerate([1.0, NAN, 3.0, float("inf")]):
        assert losses.add(result(step, loss), step, filtered=filtered) is (loss in (1.0, 3.0) or not filtered)
    logs = losses.drain(4)
    assert logs["nan_losses"] == 2 and (not filtered or logs["loss"] > 0)
    losses.add(result(4, 2.0), 4, filtered=filtered)
    assert "nan_losses" not in losses.drain(5) and losses.nonfinite_total == 2


def test_a_trainer_counts_them_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.train.session import session

    train = session.Session.train

    def odd(self: Any, batches: Any) -> list[StepResult]:
        return [replace(found, loss=NAN if found.step == 1 else found.loss) for found in train(self, batches)]

    monkeypatch.setattr(session.Session, "train", odd)
    trainer = ours(gpt2(), tmp_path, text(), max_steps=4, logging_steps=2)
    output = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry.get("nan_losses") for entry in logs] == [1, None] and all(entry["loss"] > 0 for entry in logs)
    assert output.metrics["nan_losses"] == 1
    assert '"nan_losses": 1' in (tmp_path / "log.jsonl").read_text()
