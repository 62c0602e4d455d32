"""The wheel in an empty environment, without torch: every verb answers, or names the extra that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_flags import VERBS

ROOT = Path(__file__).parent.parent
ANSWERS = {
    "show": ("onef1b",),
    "check": ("plan.json",),
    "simulate": ("chimera", "--json"),
    "compare": ("--memory", "4"),
    "schedules": (),
    "cluster": ("show", "8xdgx-a100"),
}
"""Verbs that need no torch."""
NEEDS = {
    "inspect": ("gpt-tiny",),
    "verify": ("mlp",),
    "train": ("gpt-tiny", "--max-steps", "1"),
    "measure": ("gpt-tiny",),
    "profile": ("gpt-tiny",),
    "plan": ("gpt-tiny", "--cluster", "laptop", "--batch", "8"),
}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**env, "NO_COLOR": "1", "COLUMNS": "120"})


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment with the wheel and what it depends on; skipped where no package index answers."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    source = folder / "source"
    shutil.copytree(ROOT / "meshwright", source / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = run(*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source), cwd=folder)
    if done.returncode and "Could not find" in done.stderr:
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    done = run(str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", str(wheel), cwd=folder)
    if done.returncode and "Could not find" in done.stderr:
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    return python.with_name("meshwright")


@pytest.mark.slow
def test_every_verb_answers_or_names_its_extra(installed: Path, tmp_path: Path) -> None:
    assert set(ANSWERS) | set(NEEDS) == set(VERBS)
    assert run(str(installed), "--version", cwd=tmp_path).stdout.startswith("meshwright ")
    assert run(str(installed), "show", "gpipe", "--format", "json", "-o", "plan.json", cwd=tmp_path).returncode == 0
    for verb, arguments in ANSWERS.items():
        done = run(str(installed), verb, *arguments, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout and not done.stderr, (verb, done.stderr)
    needing = {**NEEDS, "simulate": ("gpipe", "--forward", "0.001", "--backward", "0.001", "--emulate", "wall")}
    for verb, arguments in needing.items():
        done = run(str(installed), verb, *arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("error: "), (verb, done.stdout, done.stderr)
        assert " need" in done.stderr and "pip install 'meshwright[" in done.stderr and "Traceback" not in done.stderr
    done = run(str(installed), "train", "job.toml", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for verb in VERBS:
        assert run(str(installed), verb, "--help", cwd=tmp_path).returncode == 0
