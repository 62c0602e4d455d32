"""Documents do what they say: every console block prints what is shown, every Python block runs.

A block with a title (```python title="train.py") is a file: it is written to the folder in which the page's commands run. Pages
with such files are walked from top to bottom. What needs no torch runs in `make test`, training in `make full`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRONT = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("index", "install", "quickstart", "pick-a-schedule"))]
"""Pages whose cheap commands run in every test run."""
CHEAP = re.compile(r"(meshwright (show|check|simulate|compare|schedules|--version)|sed|cut|cat)\b")
CHEAP_PYTHON = [ROOT / "docs" / f"{name}.md" for name in ("index", "own-loop", "pick-a-schedule")]
PORT = "29617"
"""The port of the documents, which may be taken on this machine."""


class Block(NamedTuple):
    """A fenced block: its language, the file that it is, if it is one, and its text."""

    language: str
    title: str
    body: str


def blocks(page: Path, *languages: str) -> list[Block]:
    return [block for block in (Block(*found) for found in BLOCK.findall(page.read_text())) if block.language in languages]


def commands(body: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block, and the lines that it is said to print; a command goes on behind a backslash."""
    found = []
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        lines = part.rstrip().splitlines()
        end = next(index for index, line in enumerate(lines) if not line.endswith("\\")) + 1
        found.append(("\n".join(lines[:end]), [line.rstrip() for line in lines[end:]]))
    return found


def free_port() -> int:
    """One that `train.sbatch` can name, too: below the ports that the system gives away by itself."""
    for port in range(20000 + os.getpid() % 9000, 32000):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("", port))
            return port
    raise AssertionError("no port is free")


def shell(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    bin_ = str(Path(sys.executable).parent)
    port = str(free_port())
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PATH": f"{bin_}:{os.environ['PATH']}", "PET_MASTER_PORT": port}
    return subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder, env={**env, **more})


def prints_what_is_shown(body: str, folder: Path, port: int) -> None:
    for command, wanted in commands(body):
        done = shell(command.replace(PORT, str(port)), folder)
        printed = [line.rstrip() for line in (done.stdout + done.stderr).rstrip().splitlines()]
        if "..." in wanted:  # a line of dots stands for what is left out
            cut = wanted.index("...")
            assert printed[:cut] == wanted[:cut], command
            rest = wanted[cut + 1 :]
            assert not rest or printed[-len(rest) :] == rest, command
        else:
            assert printed == wanted, (command, [path.read_text() for path in folder.glob("*.txt")])


def is_cheap(block: Block) -> bool:
    """Whether every command of a console block answers without torch."""
    return all(CHEAP.match(part.strip()) for command, _ in commands(block.body) for part in command.split("|"))


def walked(page: Path) -> bool:
    """Whether a page has files that its commands use."""
    return any(block.title for block in blocks(page, "python", "bash", "toml"))


CONSOLE = [(page, block.body) for page in PAGES if not walked(page) for block in blocks(page, "console")]


@pytest.mark.parametrize("page", FRONT, ids=lambda page: page.stem)
def test_cheap_commands_of_the_first_pages(page: Path, tmp_path: Path) -> None:
    found = [block for block in blocks(page, "console") if is_cheap(block)]
    assert found
    for block in found:
        prints_what_is_shown(block.body, tmp_path, 0)


@pytest.mark.parametrize(("page", "body"), CONSOLE, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(CONSOLE)])
@pytest.mark.slow
def test_console_blocks_print_what_is_shown(page: Path, body: str, tmp_path: Path) -> None:
    prints_what_is_shown(body, tmp_path, 0)


def run_python(page: Path, bodies: list[str]) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for body in bodies:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(body, str(page), "exec"), names)


def plain_python(page: Path) -> list[str]:
    return [block.body for block in blocks(page, "python") if not block.title]


SLOW_PYTHON = [page for page in PAGES if page not in CHEAP_PYTHON and not walked(page) and plain_python(page)]


@pytest.mark.parametrize(
    "page", [*CHEAP_PYTHON, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW_PYTHON)], ids=lambda page: page.stem
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plain_python(page)
    run_python(page, plain_python(page))


@pytest.mark.parametrize("page", [page for page in PAGES if walked(page)], ids=lambda page: page.stem)
@pytest.mark.slow
def test_pages_with_files_run_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    port, names = free_port(), [block.title for block in blocks(page, "python", "toml") if block.title]
    assert names
    for block in blocks(page, "python", "console", "bash", "toml"):
        if block.title:
            (tmp_path / block.title).write_text(block.body)
        elif block.language == "python":
            run_python(page, [block.body])
        elif block.language == "console":
            prints_what_is_shown(block.body, tmp_path, port)


@pytest.mark.parametrize("page", [page for page in PAGES if walked(page)], ids=lambda page: page.stem)
def test_files_on_pages_are_well_formed(page: Path, tmp_path: Path) -> None:
    """What is run in `make full` alone is at least read here."""
    for block in blocks(page, "python", "bash"):
        (tmp_path / "block").write_text(block.body)
        if block.language == "python":
            compile(block.body, f"{page.name}: {block.title}", "exec")
        else:
            done = subprocess.run(["bash", "-n", str(tmp_path / "block")], capture_output=True, text=True)
            assert done.returncode == 0 and not done.stderr, done.stderr


SRUN = """#!/bin/bash
for SLURM_NODEID in $(seq 0 $((SLURM_NNODES - 1))); do export SLURM_NODEID; "$@" & done
wait
"""


@pytest.mark.slow
def test_the_job_of_slurm_with_stand_ins(tmp_path: Path) -> None:
    """No SLURM here: two commands of it are replaced by what they would do, and both nodes are this machine."""
    page = ROOT / "docs" / "several-hosts.md"
    files = {block.title: block.body for block in blocks(page, "python", "bash") if block.title}
    (tmp_path / "bin").mkdir()
    stand_ins = {"bin/srun": SRUN, "bin/scontrol": "#!/bin/bash\necho 127.0.0.1\necho second\n"}
    for name, content in {**files, **stand_ins}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    nodes = re.search(r"--nodes=(\d+)", files["train.sbatch"])
    assert nodes is not None
    given = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(free_port() - 20000), "SLURM_NNODES": nodes[1]}
    bin_ = Path(sys.executable).parent
    path = f"{tmp_path / 'bin'}:{bin_}:{os.environ['PATH']}"
    done = shell("bash train.sbatch", tmp_path, PATH=path, **given)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "steps: 6", done.stdout + done.stderr


def test_the_readme_names_every_make_target() -> None:
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text()))
    assert targets <= named, targets - named
    assert named <= targets, named - targets


def test_the_docs_show_a_whole_schedule_file() -> None:
    code = (ROOT / "meshwright" / "schedules" / "gpipe.py").read_text().partition("annotations\n\n")[2]
    assert code in [block.body for block in blocks(ROOT / "docs" / "add-a-schedule.md", "python")]


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(
        r"`((?:tests|examples|ir|passes|simulate|schedules|runtime|train)/[\w/]+\.py)`", (ROOT / "README.md").read_text()
    )
    assert len(named) >= 12
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "meshwright" / name).exists(), name


def test_links_inside_the_repository_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(("page", "least"), [("README.md", 9), ("docs/schedules.md", 18)])
def test_the_table_of_schedules_is_what_compare_prints(page: str, least: int) -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "compare", "--workers", "4", "--microbatches", "8", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["rows"]
    found = {row["schedule"]: row for row in rows if row["step_s"] is not None}
    shown = re.findall(
        r"^\| ([\w= ]+?) \| [^|]+ \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / page).read_text(), re.M
    )
    assert len(shown) >= least
    for name, *numbers in shown:
        row = found[name]
        wanted = (row["step_s"], 100 * row["bubble_ratio"], row["parameter_copies"], row["peak_activations"])
        assert [float(n) for n in numbers] == pytest.approx(wanted, abs=0.006), name
