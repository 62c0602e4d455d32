"""The command with all of its verbs: for typer's runner, and in a process of its own as users type it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.cli._verbs import command_line
from meshwright.cli.main import main

app = command_line()

WITH_TORCH = {"inspect", "verify", "train", "measure", "profile"}
"""Verbs that import torch and transformers, which takes seconds: they are forked from a process that has done it."""


def meshwright(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own. What it prints goes to files, so nothing of it is a terminal."""
    more = {"NO_COLOR": "1", "COLUMNS": "200", **(env or {})}
    if not WITH_TORCH & set(arguments[:1]):
        command = [sys.executable, "-m", "meshwright.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **more})
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        given = (arguments, str(cwd or Path.cwd()), {**os.environ, **more}, [str(path) for path in paths])
        process = multiprocessing.get_context("forkserver").Process(target=_forked, args=given)
        process.start()
        process.join()
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in paths))


def _forked(arguments: tuple[str, ...], folder: str, env: dict[str, str], paths: list[str]) -> None:
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, folder)
    sys.argv = ["meshwright", *arguments]
    main()
