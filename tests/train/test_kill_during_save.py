"""A kill at any moment of a save leaves the last good checkpoint as it was: SIGKILL, many times, then resume."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.runtime.launch.workers import RankFailed, Workers
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.models.small_models import gpt
from tests.conftest import Pool
from tests.support.saving import Outcome, Run, adamw, made, run_on

STEPS, SHORT = 250, 64
LIMIT = 2


def recipe(folder: Path, steps: int) -> Run:
    build = partial(gpt, blocks=2, width=16)
    return Run({"pp": 2, "microbatches": 2}, str(folder), steps, build=build, optimizer=adamw, limit=LIMIT)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(run: Run, victim: int, after_s: float, operation: int) -> Outcome:
    """Resume, then save behind every step; die some time after the first save began, or at some operation on files."""
    engine = made(run)
    checkpoints = Checkpoints(Path(run.folder), engine, limit=run.limit)
    found, out = checkpoints.resume(), Outcome()
    out.first = found.step if found else 0
    chosen = dist.get_rank() == victim
    for step in range(out.first, run.steps):
        tallies = engine.run(run.batch, step)
        note(run, "losses", step, sum(float(t.loss) for t in tallies.values()))
        if chosen and step == out.first:
            if operation:
                die_at(operation, run.folder)
            else:
                threading.Timer(after_s, die).start()
        checkpoints.save(step + 1)
        note(run, "saved", step)  # the one before is on disk now: a save waits for the last
    checkpoints.close()
    engine.close()
    return out


def note(run: Run, what: str, *values: float) -> None:
    """Outside the folder of checkpoints, and not lost by a kill of this process."""
    with Path(f"{run.folder}.{what}{dist.get_rank()}").open("a") as file:
        file.write(" ".join(map(repr, values)) + "\n")


def die_at(operation: int, folder: str) -> None:
    """From now on count what is opened, made, renamed and removed in a folder, and die before the given one."""
    left = [operation]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir") and str(args[0]).startswith(folder):
            left[0] -= 1
            if not left[0]:
                die()

    sys.addaudithook(hook)


def check(run: Run, wanted: dict[int, float], before: int) -> int:
    """The last good checkpoint is whole and not older than what was promised; losses so far are those of a run in one go."""
    good = rotate.last_good(Path(run.folder))
    step = 0 if good is None else rotate.step_of(good)
    promised = [int(line) for line in read(run, "saved0")]
    assert step >= max([before, *promised[-1:]], default=0), "a finished checkpoint was lost"
    whole = rotate.checkpoints(Path(run.folder))
    assert all(not rotate.damage(path) for path in whole), "what has its name is whole"
    for line in read(run, "losses1"):
        at, loss = line.split()
        assert abs(float(loss) - wanted[int(at)]) <= 1e-9 * wanted[int(at)], f"step {at} after a resume"
    return step


def read(run: Run, what: str) -> list[str]:
    path = Path(f"{run.folder}.{what}")
    return [line for line in path.read_text().splitlines() if line] if path.exists() else []


def killed_again_and_again(run: Run, wanted: dict[int, float], kills: list[tuple[int, float, int]]) -> int:
    """How many of the kills came; a run that ends before its kill is none."""
    count = step = 0
    with Workers(2) as workers:
        for victim, after_s, operation in kills:
            part = Run(**{**vars(run), "steps": min(step + 6, run.steps)})
            try:
                workers.run(train_until_killed, part, victim, after_s, operation)
            except RankFailed:
                count += 1
            step = check(run, wanted, step)
    return count


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nobody kills."""
    return run_on(pool, recipe(tmp_path_factory.mktemp("straight"), SHORT)).losses


@pytest.fixture(scope="module")
def longer(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The same for longer."""
    return run_on(pool, recipe(tmp_path_factory.mktemp("longer"), STEPS)).losses


def random_kills(count: int, seed: int) -> list[tuple[int, float, int]]:
    draw = random.Random(seed)
    return [(draw.randrange(2), draw.uniform(0, 0.15), 0) for _ in range(count)]


@pytest.mark.slow
def test_killed_at_random_moments(straight: dict[int, float], tmp_path: Path) -> None:
    begin = time.monotonic()
    count = killed_again_and_again(recipe(tmp_path / "run", SHORT), straight, random_kills(10, 0))
    assert count >= 5, f"{count} kills in {time.monotonic() - begin:.0f} s"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_killed_at_many_random_moments(longer: dict[int, float], tmp_path: Path, seed: int) -> None:
    assert killed_again_and_again(recipe(tmp_path / "run", STEPS), longer, random_kills(40, seed)) >= 20


def test_killed_before_some_operations_on_files(straight: dict[int, float], tmp_path: Path) -> None:
    kills = [(operation % 2, 0.0, operation) for operation in range(1, 57, 8)]
    assert killed_again_and_again(recipe(tmp_path / "run", SHORT), straight, kills) >= 5


@pytest.mark.slow
def test_killed_before_every_operation_on_files(longer: dict[int, float], tmp_path: Path) -> None:
    """Of the first rank, which names, marks and rotates: far enough for several saves and rotations."""
    kills = [(0, 0.0, operation) for operation in range(1, 90)]
    assert killed_again_and_again(recipe(tmp_path / "run", STEPS), longer, kills) >= 80
