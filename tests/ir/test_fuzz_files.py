"""Every reader of a file under random damage: a million inputs in `make full`, some hundreds of each always."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.fuzzing import FORMS, fuzz
from tests.support.paths import ROOT

INPUTS = 1_000_000
PACKAGE = ROOT / "meshwright"
PARSERS = re.compile(
    r"\b(json\.loads?|tomllib\.loads?|parsed|toml|safe_open|open_|from_csv|csv\.reader|torch\.load|profile_from_text)\("
)
READ_BY = {
    "capture/weights/safetensors_files.py": {"index", "safetensors"},
    "cli/train.py": {"job.toml", "model.toml"},
    "ir/files/cluster_file.py": {"cluster.json"},
    "ir/files/cluster_json.py": {"cluster"},
    "ir/files/cluster_toml.py": {"cluster.toml"},
    "ir/files/profile_json.py": {"profile.json"},
    "ir/files/profile_text.py": {"profile"},
    "ir/files/schedule_csv.py": {"csv"},
    "ir/files/schedule_json.py": {"schedule", "lowered"},
    "ir/input_limits.py": {"plan.toml", "job.toml", "model.toml"},
    "ir/files/measurement.py": {"measurement"},
    "ir/files/model_json.py": {"graph"},
    "ir/plan/plan_file.py": {"plan.json", "plan text", "plan.toml", "order.json", "order text", "order.toml"},
    "ir/plan/planned_file.py": {"planned.json"},
    "ir/stage_cost.py": {"costs"},
    "ir/reader.py": {"plan.json"},
    "ir/timeline.py": {"timeline"},
    "runtime/watchdog/failure.py": {"doing", "failure"},
    "schedules/_orders/user_schedule.py": {"csv"},
    "train/data/named_datasets.py": {"texts", "tokens", "text"},
    "train/checkpoint/checkpoint_facts.py": {"facts"},
    "train/checkpoint/folder_lock.py": {"lock"},
    "train/job_file.py": {"job.toml"},
    "train/models/model_names.py": {"model.toml", "config.json"},
    "train/checkpoint/folders.py": {"marker"},
}
"""Every file that parses something, with the forms that go through it here."""
WRITES = {
    "cli/_parts/request_layers.py",
    "cli/_parts/profile_costs.py",
    "planners/_pricing/pricing.py",
    "report/prediction_log.py",
    "train/auto/auto_plan.py",
    "capture/trace/export.py",
    "capture/trace/size_conditions.py",
    "runtime/json_exchange.py",
    "runtime/launch/torchrun.py",
    "train/checkpoint/pretrained_weights.py",
    "train/checkpoint/write.py",
}
"""Files that parse nothing themselves (a verb that calls a reader), or no user file: conditions of torch, messages of ranks of
one run, and files that were just written. The log of predictions skips damaged lines (`tests/train/test_auto.py`)."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def test_every_reader_is_here() -> None:
    """A new reader needs a line in the table and a form."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if PARSERS.search(path.read_text())}
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
