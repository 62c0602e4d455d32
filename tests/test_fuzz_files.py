"""Every reader of a file under random damage: a million inputs in `make full`, some hundreds of each always."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuzzing import FORMS, fuzz

INPUTS = 1_000_000
ROOT = Path(__file__).parent.parent / "meshwright"
PARSERS = re.compile(r"\b(json\.loads?|tomllib\.loads?|parsed|toml|safe_open|open_|from_csv|csv\.reader|torch\.load)\(")
READ_BY = {
    "capture/weights.py": {"index", "safetensors"},
    "cli/train.py": {"job.toml", "model.toml"},
    "ir/cluster.py": {"cluster"},
    "ir/csv_form.py": {"csv"},
    "ir/files.py": {"schedule", "lowered"},
    "ir/limits.py": {"plan.toml", "job.toml", "model.toml"},
    "ir/measurement.py": {"measurement"},
    "ir/model.py": {"graph"},
    "ir/plan_file.py": {"plan.json", "plan text", "plan.toml", "order.json", "order text", "order.toml"},
    "ir/profile.py": {"costs"},
    "ir/reading.py": {"plan.json"},
    "ir/timeline.py": {"timeline"},
    "runtime/failure.py": {"doing", "failure"},
    "schedules/_own.py": {"csv"},
    "train/datasets.py": {"texts", "tokens", "text"},
    "train/facts.py": {"facts"},
    "train/folder_lock.py": {"lock"},
    "train/job.py": {"job.toml"},
    "train/named.py": {"model.toml", "config.json"},
    "train/rotate.py": {"marker"},
}
"""Every file that parses something, with the forms that go through it here."""
WRITES = {"capture/export.py", "capture/conditions.py", "train/readable.py"}
"""Files with a parser of that name that read nothing of a user's: conditions of torch, and a file that was just written."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def test_every_reader_is_here() -> None:
    """A new reader needs a line in the table and a form."""
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if PARSERS.search(path.read_text())}
    assert found - WRITES == set(READ_BY)
    assert set().union(*READ_BY.values()) == set(FORMS)


@pytest.mark.parametrize("kind", FORMS)
def test_damaged_files(kind: str, folder: Path) -> None:
    refused, read = fuzz(kind, 300, folder)
    assert refused and refused + read == 300


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_a_million_damaged_files(kind: str, folder: Path) -> None:
    fuzz(kind, -(-INPUTS // len(FORMS)), folder, seed=1)
