"""Documents do what they say: every console block prints what is shown, every Python block runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text()) if kind == language]


CONSOLE = [(page, body) for page in PAGES for body in blocks(page, "console")]


@pytest.mark.parametrize(("page", "body"), CONSOLE, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(CONSOLE)])
@pytest.mark.slow
def test_console_blocks_print_what_is_shown(page: Path, body: str, tmp_path: Path) -> None:
    bin_ = str(Path(sys.executable).parent)
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PATH": f"{bin_}:{os.environ['PATH']}"}
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, env=env)
        printed = [line.rstrip() for line in (done.stdout + done.stderr).rstrip().splitlines()]
        wanted = [line.rstrip() for line in shown.rstrip().splitlines()]
        if "..." in wanted:  # a line of dots stands for what is left out
            cut = wanted.index("...")
            assert printed[:cut] == wanted[:cut], command
            rest = wanted[cut + 1 :]
            assert not rest or printed[-len(rest) :] == rest, command
        else:
            assert printed == wanted, command


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
@pytest.mark.slow
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    for body in blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(body, str(page), "exec"), names)


def test_the_readme_names_every_make_target() -> None:
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text()))
    assert targets <= named, targets - named
    assert named <= targets, named - targets


def test_links_inside_the_repository_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_schedules_is_what_compare_prints() -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "compare", "--workers", "4", "--microbatches", "8", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["rows"]
    found = {row["schedule"]: row for row in rows if row["step_s"] is not None}
    shown = re.findall(
        r"^\| ([\w= ]+?) \| [^|]+ \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(shown) >= 18
    for name, *numbers in shown:
        row = found[name]
        wanted = (row["step_s"], 100 * row["bubble_ratio"], row["parameter_copies"], row["peak_activations"])
        assert [float(n) for n in numbers] == pytest.approx(wanted, abs=0.006), name
