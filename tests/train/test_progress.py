"""What a user sees while a run goes on: phases and logs as they come, speed in every log, operations, memory, trackers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback
from typer.testing import CliRunner

from meshwright import MeshwrightError
from meshwright.capture.model_graph import capture
from meshwright.runtime.launch.workers import Workers
from meshwright.train.loop.report_to import refuse_reporters
from tests.support.command import app
from tests.support.trainers import Plain, gpt2, ours, text, vectors

JOB = [
    "tests.support.trainers:Plain",
    "--dataset",
    "tests.support.trainers:vectors",
    "--save-strategy",
    "no",
    "--logging-steps",
    "1",
]
PHASES = ["capture", "cut", "check", "schedule", "start workers", "set up ranks", "first step"]


def test_outside_a_terminal_phases_and_logs_come_while_it_runs(tmp_path: Path) -> None:
    """The pipe is read while the run goes on; a line that is held back until the end would come after the process."""
    command = [sys.executable, "-m", "meshwright.cli.main", "train", *JOB, "--pp", "2", "--max-steps", "30"]
    env = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([*command, "--output-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env)
    assert run.stdout is not None
    lines, running = [], []
    for line in run.stdout:
        lines.append(line.rstrip())
        running.append(run.poll() is None)
    assert run.wait() == 0
    phases = [line.partition(":")[0] for line in lines if line.endswith(" s") and line.partition(":")[0] in PHASES]
    assert phases == PHASES
    logs = [at for at, line in enumerate(lines) if line.startswith("step ") and "/30" in line]
    assert len(logs) == 30 and "step 1/30" in lines[logs[0]] and "loss " in lines[logs[0]]
    assert all("samples/s" in lines[at] for at in logs)
    assert running[logs[0]] and not lines[0].startswith("step")
    assert any(line.startswith("step ") and "(median)" in line for line in lines[logs[-1] :])
    [memory] = [line for line in lines if line.startswith("peak memory per rank: ")]
    assert memory.count("MB") + memory.count("GB") == 2
    assert lines[-1] == f"log: {tmp_path / 'log.jsonl'}"


def test_json_is_one_document_and_the_rest_goes_elsewhere(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", *JOB, "--max-steps", "2", "--output-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["steps"] == 2 and len(found["peak_bytes"]) == 1 and found["metrics"]["total_flos"] > 0
    assert "capture: " in done.stderr and "step 2/2" in done.stderr


def test_on_a_terminal_the_wait_is_shown() -> None:
    code = (
        "import time\nfrom meshwright.report.progress import Lines\nlines = Lines()\nlines.begin('start workers')\n"
        "time.sleep(0.3)\nlines.end('start workers', 0.3)\nprint(lines.on_terminal)"
    )
    ours_, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = os.read(ours_, 100_000).decode()
    os.close(ours_)
    assert done.returncode == 0 and shown.index("start workers ...") < shown.index("start workers: 0.3 s") and "True" in shown


def test_the_library_itself_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours(Plain(), tmp_path, vectors(), max_steps=2).train()
    found = capfd.readouterr()
    assert found.out == "" and "step" not in found.err


@pytest.mark.parametrize("plan", [None, {"pp": 2, "dp": 2}], ids=str)
def test_every_log_says_how_fast_it_goes(plan: Any, tmp_path: Path, workers: Workers) -> None:
    """And the end how much was computed: three times the captured forward of 44 rows twice, also of short batches."""
    trainer = ours(gpt2(), tmp_path, text(44), workers, parallel=plan, per_device_train_batch_size=8)
    metrics = trainer.train().metrics
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) > 3 and all(entry["tokens_per_second"] > 0 for entry in logs)
    assert metrics["train_tokens_per_second"] == pytest.approx(16 * metrics["train_samples_per_second"], rel=0.01)
    assert len(trainer.peak_bytes) == trainer.args.plan.processes and min(trainer.peak_bytes) > 10_000_000
    assert metrics["train_peak_mem_bytes"] == max(trainer.peak_bytes) and metrics["train_step_time"] > 0
    trainer.log_metrics("train", metrics)  # as scripts of Hugging Face do
    saved = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all("tokens_per_second" in entry for entry in saved if "loss" in entry)
    rows = {name: torch.tensor([row[name] for row in text(4)]) for name in ("input_ids", "labels")}
    forward = capture(gpt2(), rows).flops / 4  # some operations are there once, however many rows there are
    assert trainer.state.total_flos == pytest.approx(3 * forward * 88, rel=1e-3)
    assert metrics["total_flos"] == trainer.state.total_flos
    with FlopCounterMode(display=False) as counter:
        gpt2()(**rows).loss.backward()
    assert 1.0 < 12 * forward / counter.get_total_flops() < 1.5  # products alone, of a model so small that others count too


def test_models_without_tokens_count_samples(tmp_path: Path) -> None:
    trainer = ours(Plain(), tmp_path, vectors(), max_steps=2)
    trainer.train()
    assert [set(entry) & {"samples_per_second", "tokens_per_second"} for entry in trainer.state.log_history[:2]] == [
        {"samples_per_second"}
    ] * 2


def test_operations_go_on_after_a_resume(tmp_path: Path) -> None:
    ours(Plain(), tmp_path, vectors(), max_steps=2, save_strategy="steps", save_steps=1).train()
    again = ours(Plain(), tmp_path, vectors(), max_steps=3)
    again.train(resume_from_checkpoint=True)
    whole = ours(Plain(), tmp_path / "whole", vectors(), max_steps=3)
    whole.train()
    assert again.state.total_flos == whole.state.total_flos > 0


def test_operations_of_a_list_of_layers_are_its_products(tmp_path: Path) -> None:
    rows = [(torch.ones(8), torch.ones(4)) for _ in range(16)]
    trainer = ours(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), tmp_path, rows, num_train_epochs=1)
    trainer.train()
    assert trainer.state.total_flos == 3 * 16 * 2 * (8 * 16 + 16 * 4)


def test_callbacks_are_told_of_phases(tmp_path: Path) -> None:
    class Listener(TrainerCallback):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def on_phase_end(self, name: str, seconds: float | None) -> None:
            assert seconds is not None and seconds >= 0
            self.heard.append(name)

    listener = Listener()
    ours(Plain(), tmp_path, vectors(), max_steps=1, callbacks=[listener]).train()
    assert listener.heard == ["capture", "cut", "check", "schedule", "set up ranks", "first step"]


@pytest.mark.parametrize(
    ("name", "package"), [("wandb", "wandb"), ("comet_ml", "comet-ml"), ("azure_ml", "azureml-sdk"), ("mlflow", "mlflow")]
)
def test_a_tracker_that_is_not_installed_names_its_package(name: str, package: str, tmp_path: Path) -> None:
    trainer = ours(Plain(), tmp_path, vectors(), report_to=[name])
    with pytest.raises(MeshwrightError, match=f"needs the package {package}, which is not installed") as caught:
        trainer.train()
    assert caught.value.fix == f"pip install {package}, or report_to='none'" and trainer.prepared is None


def test_every_tracker_that_transformers_knows_has_a_package(tmp_path: Path) -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from meshwright.train.loop import report_to as reporting

    assert set(INTEGRATION_TO_CALLBACK) - {"kubeflow"} <= set(reporting._PACKAGES)  # kubeflow is an environment
    for name in reporting._PACKAGES:
        assert hasattr(reporting.integration_utils, f"is_{reporting._AVAILABLE_AS.get(name, name)}_available"), name
    with pytest.raises(MeshwrightError, match="zz is not supported"):
        refuse_reporters(["zz"])
    for word, wanted in (("none", []), ("all", reporting.integration_utils.get_available_reporting_integrations())):
        trainer = ours(Plain(), tmp_path, vectors(), report_to=word, max_steps=1)
        assert trainer.args.report_to == wanted and trainer.train().global_step == 1


FAKE = """
class Live:
    def __init__(self, *_, **__):
        self.step, self.logged = 0, LOGGED
    def log_metric(self, name, value, **__):
        LOGGED.append((self.step, name, value))
    def log_params(self, params):
        LOGGED.append((0, "params", params["parallel"]))
    def next_step(self):
        pass
    def end(self):
        LOGGED.append((self.step, "end", 0))
LOGGED = []
"""


def test_logs_are_passed_on_to_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for dvclive, found by transformers as the real one would be."""
    package = tmp_path / "lib" / "dvclive"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "plots").mkdir()
    (package / "plots" / "__init__.py").write_text(
        "class Metric:\n    @staticmethod\n    def could_log(value):\n        return True\n"
    )
    (package / "utils" / "__init__.py").write_text("def standardize_metric_name(name, _):\n    return name\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    trainer = ours(Plain(), tmp_path / "out", vectors(), max_steps=2, report_to=["dvclive"], eval_dataset=vectors(8),
                   eval_strategy="steps", eval_steps=2)  # fmt: skip
    trainer.train()
    import dvclive

    names = [name for _, name, _ in dvclive.LOGGED]
    assert names.count("loss") == 2 and names.count("samples_per_second") == 2 and "eval_loss" in names and "end" in names
    assert "total_flos" in names and "train_step_time" in names
