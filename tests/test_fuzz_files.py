"""Every reader of a file under random damage: a million inputs in `make full`, some hundreds of each always."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzzing import FORMS, fuzz

INPUTS = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("kind", FORMS)
def test_damaged_files(kind: str, folder: Path) -> None:
    refused, read = fuzz(kind, 300, folder)
    assert refused and refused + read == 300


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_a_million_damaged_files(kind: str, folder: Path) -> None:
    fuzz(kind, -(-INPUTS // len(FORMS)), folder, seed=1)
