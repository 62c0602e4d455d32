"""A script for the Hugging Face Trainer and the same for ours: five lines apart at most, shown in the README, equal losses."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BEFORE, AFTER = (ROOT / "examples" / "script" / name for name in ("before.py", "after.py"))
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def changed() -> list[str]:
    lines = difflib.unified_diff(BEFORE.read_text().splitlines(), AFTER.read_text().splitlines(), n=0, lineterm="")
    return [line for line in lines if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]


def losses(folder: Path, *command: str) -> list[float]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=ENV, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lists = re.findall(r"\[\d[^\[\]]*\]", done.stdout)  # what two ranks print may share a line
    found: list[float] = ast.literal_eval(lists[0])
    assert all(ast.literal_eval(text) == found for text in lists), "ranks differ"
    return found


def test_the_scripts_are_at_most_five_lines_apart() -> None:
    assert 0 < len(changed()) <= 5


def test_the_readme_shows_the_difference() -> None:
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    shown = [line for line in blocks[0].splitlines() if line.startswith(("+", "-"))]
    assert shown == changed()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("before"), str(BEFORE))


def test_the_script_starts_its_workers_and_has_the_same_losses(expected: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path, str(AFTER))
    assert found == pytest.approx(expected, rel=1e-5) and found[-1] < found[0]


@pytest.mark.slow
def test_the_script_under_torchrun_has_the_same_losses(expected: list[float], tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(AFTER)]
    assert losses(tmp_path, *command) == pytest.approx(expected, rel=1e-5)
