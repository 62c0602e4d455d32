"""`meshwright train` resumes when it is asked to, under either name, and what cannot be resumed leaves the old run alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright import MeshwrightError
from meshwright.train.job_file import Job
from tests.support.command import app

FLAGS = ["train", "gpt-tiny", "--per-device-train-batch-size", "4", "--length", "16", "--logging-steps", "1"]
FLAGS += ["--disable-tqdm", "true", "--report-to", "none"]


def trained(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """The log of a run from the command line."""
    done = CliRunner().invoke(app, [*FLAGS, "--output-dir", str(folder), *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that has saved two."""
    folder = tmp_path_factory.mktemp("whole")
    trained(folder, "--max-steps", "3", "--save-steps", "2", "--lr-scheduler-type", "constant")
    return folder


@pytest.mark.parametrize("flag", ["--resume-from-checkpoint", pytest.param("--resume", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_named_checkpoint(flag: str, whole: Path, tmp_path: Path) -> None:
    more = ("--max-steps", "3", "--save-strategy", "no", "--lr-scheduler-type", "constant")
    found = trained(tmp_path, *more, flag, str(whole / "checkpoint-2"))
    expected = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in expected if "loss" in line}
    assert [line["step"] for line in found if "loss" in line] == [3]
    assert found[0]["loss"] == pytest.approx(losses[3], rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--resume-from-checkpoint", "nowhere"), "nowhere does not exist"),
        (("--resume-from-checkpoint", ""), "must be a folder, got ''"),
        (("--resume", "nowhere"), "nowhere does not exist"),
        (("--resume", "last", "--resume-from-checkpoint", "nowhere"), "are both given"),
    ],
)
def test_what_cannot_be_resumed_is_an_error_and_overwrites_nothing(flags: tuple[str, ...], words: str, whole: Path) -> None:
    before = files(whole)
    with pytest.raises(MeshwrightError, match=words):
        CliRunner().invoke(app, [*FLAGS, "--output-dir", str(whole), "--max-steps", "3", *flags], catch_exceptions=False)
    assert files(whole) == before


def test_a_file_says_the_same(whole: Path) -> None:
    folder = str(whole / "checkpoint-2")
    assert Job("gpt-tiny", arguments={"resume_from_checkpoint": folder}).checkpoint == folder
    assert Job("gpt-tiny", arguments={"resume_from_checkpoint": True}).checkpoint is True
    assert Job("gpt-tiny", resume="last").checkpoint is True
    assert Job("gpt-tiny", resume=False).checkpoint is None and Job("gpt-tiny").checkpoint is None
