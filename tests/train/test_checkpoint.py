"""Checkpoints know no plan: what one has written any other resumes, with the trajectory of a run that never stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import MeshwrightError
from meshwright.runtime.stage.precision import Precision
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.models.small_models import gpt
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool
from tests.support.saving import MLP, Run, adamw, made, run_on, same, sequence, warmup
from tests.support.thin import slow

PLANS: dict[str, dict[str, Any]] = {
    "one": {"pp": 1, "microbatches": 4},
    "onef1b": {"pp": 2, "microbatches": 4},
    "chimera": {"pp": 4, "schedule": "chimera", "microbatches": 4},
    "dp": {"pp": 1, "dp": 2, "microbatches": 2},
    "interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved", "microbatches": 2},
    "width": {"pp": 2, "width": (2, 1), "microbatches": 4},
    "zero_bubble": {"pp": 4, "schedule": "zero_bubble", "microbatches": 4},
    "chimera_dp": {"pp": 2, "dp": 2, "schedule": "chimera", "microbatches": 2},
    "shuffled": {"pp": 2, "dp": 2, "microbatches": 2, "ranks": (6, 1, 3, 2)},
}
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": momentum},
    "adamw": {"optimizer": adamw, "scheduler": warmup},
    "nested": {"optimizer": adamw, "scheduler": sequence},
}


@pytest.mark.parametrize("recipe", ["adamw", *(slow(name) for name in RECIPES if name != "adamw")])
def test_a_run_that_changes_its_plan_behind_every_step_is_the_run_that_does_not(pool: Pool, tmp_path: Path, recipe: str) -> None:
    order = [*PLANS.values(), PLANS["one"]]
    steps = len(order)
    wanted = run_on(pool, Run(PLANS["onef1b"], str(tmp_path / "straight"), steps, **RECIPES[recipe]))
    for step, plan in enumerate(order):
        run = Run(plan, str(tmp_path / "run"), step + 1, resume=True, saves=(step + 1,), **RECIPES[recipe])
        found = run_on(pool, run)
        assert found.first == step and list(found.losses) == [step]
        assert found.data == (None if not step else {"seen": 8 * step})
        assert abs(found.losses[step] - wanted.losses[step]) <= 1e-9 * wanted.losses[step], (step, plan)
    same(found, wanted)
    assert [path.name for path in rotate.checkpoints(tmp_path / "run")] == [f"checkpoint-{s + 1}" for s in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("before", PLANS)
def test_every_plan_resumes_from_every_other(pool: Pool, tmp_path: Path, before: str, recipe: str) -> None:
    for model in ({}, MLP):
        folder = tmp_path / ("mlp" if model else "gpt")
        wanted = run_on(pool, Run(PLANS[before], str(folder), 5, saves=(2,), **model, **RECIPES[recipe]))
        for after in PLANS.values():
            found = run_on(pool, Run(after, str(folder), 5, resume=True, **model, **RECIPES[recipe]))
            assert found.first == 2
            same(found, wanted)


def test_dropout_goes_on_where_it_stopped(pool: Pool, tmp_path: Path) -> None:
    """Its streams are those of seed, step and microbatch; the seed is the checkpoint's."""
    build = partial(gpt, blocks=4, width=16, dropout=0.3)
    wanted = run_on(pool, Run(PLANS["onef1b"], str(tmp_path), 4, build=build, saves=(2,), seed=5))
    found = run_on(pool, Run(PLANS["zero_bubble"], str(tmp_path), 4, build=build, resume=True, seed=6))
    same(found, wanted)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw", "cyclic"])
def test_without_a_flush_the_newest_version_behind_a_drain_is_saved(pool: Pool, tmp_path: Path, schedule: str) -> None:
    plan = {"pp": 2, "schedule": schedule, "microbatches": 2}
    wanted = run_on(pool, Run(plan, str(tmp_path), 6, saves=(2, 4)))
    found = run_on(pool, Run(plan, str(tmp_path), 6, resume=str(tmp_path / "checkpoint-2")))
    assert found.first == 2
    same(found, wanted)
    other = run_on(pool, Run(PLANS["chimera"], str(tmp_path), 5, resume=True))
    assert other.first == 4 and list(other.losses) == [4]
    again = run_on(pool, Run(PLANS["dp"], str(tmp_path), 5, resume=True))
    same(again, other)


class Counting(nn.Module):
    """A layer with statistics, a buffer that is not saved, a frozen parameter and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Everything is used."""
        return self.linear(self.norm(x)) * self.scale + self.frozen


def counting() -> list[nn.Module]:
    return [Counting() for _ in range(4)]


def test_buffers_frozen_parameters_and_scalars_are_kept(pool: Pool, tmp_path: Path) -> None:
    model = {"build": counting, "batch": MLP["batch"], "optimizer": adamw}
    wanted = run_on(pool, Run({"pp": 2, "microbatches": 4}, str(tmp_path), 4, saves=(2,), **model))
    found = run_on(pool, Run({"pp": 4, "microbatches": 4}, str(tmp_path), 4, resume=True, seed=1, **model))
    same(found, wanted)
    ranks = pool.run(buffers_after_resume, Run({"pp": 2, "microbatches": 4}, str(tmp_path), 4, **model), ranks=2)
    assert {name for rank in ranks for name in rank} == {
        f"{i}.norm.{b}" for i in range(4) for b in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert all(rank[name].item() == 8 for rank in ranks for name in rank if name.endswith("tracked")), "2 steps of 4"


def buffers_after_resume(run: Run) -> dict[str, torch.Tensor]:
    from meshwright.train.checkpoint.run_state import buffers

    engine = made(run)
    checkpoints = Checkpoints(Path(run.folder), engine)
    checkpoints.resume()
    checkpoints.close()
    engine.close()
    return {name: b.clone() for name, b in buffers(engine).items()}


def scale_after(run: Run) -> dict[str, float]:
    """Save with a loss scale that has moved, and resume with a fresh one."""
    states = []
    for resumes in (False, True):
        engine = made(run)
        engine.scaler = Precision(compute="fp16").scaler()
        checkpoints = Checkpoints(Path(run.folder), engine)
        assert engine.scaler is not None
        if resumes:
            checkpoints.resume()
        else:
            engine.scaler.update(float("inf"))
            checkpoints.save(1)
        checkpoints.close()
        states.append(engine.scaler.state_dict())
        engine.close()
    assert states[0] == states[1]
    return states[1]


def test_the_loss_scale_goes_on_where_it_was(pool: Pool, tmp_path: Path) -> None:
    fresh = Precision(compute="fp16").scaler()
    assert fresh is not None
    for found in pool.run(scale_after, Run({"pp": 2}, str(tmp_path), 1), ranks=2):
        assert found["skipped"] == 1 and found["scale"] < fresh.scale


# -- in the background


def save_while_training(run: Run) -> list[bool]:
    """Save, and train on before anything is written: the writer waits for us."""
    import threading

    engine, gate = made(run), threading.Event()
    checkpoints = Checkpoints(Path(run.folder), engine)
    write, checkpoints._write = checkpoints._write, lambda job: (gate.wait(60), write(job))[1]  # type: ignore[method-assign,assignment]
    seen = []
    for step in range(4):
        engine.run(run.batch, step)
        if step == 1:
            path = checkpoints.save(2)
            seen.append(path.exists())
    seen.append(path.exists())
    gate.set()
    checkpoints.close()
    seen.append(path.exists())
    engine.close()
    return seen


def test_training_goes_on_while_a_checkpoint_is_written(pool: Pool, tmp_path: Path) -> None:
    run = Run({"pp": 2}, str(tmp_path / "a"), 4, optimizer=adamw)
    for seen in pool.run(save_while_training, run, ranks=2):
        assert seen == [False, False, True]
    wanted = run_on(pool, Run({"pp": 2}, str(tmp_path / "b"), 4, optimizer=adamw))
    same(run_on(pool, Run({"pp": 1, "microbatches": 2}, str(tmp_path / "a"), 4, resume=True, optimizer=adamw)), wanted)


def save_on_a_bad_disk(run: Run, bad_rank: int) -> list[str]:
    """One rank cannot write the second of three checkpoints."""
    from meshwright.train.checkpoint import write as checkpoint

    engine = made(run)
    checkpoints = Checkpoints(Path(run.folder), engine)
    said = []

    def broken(folder: Path, share: int, shares: int) -> dict[str, Any]:
        if share == bad_rank:
            raise OSError(28, "No space left on device")
        return {}

    good = checkpoint._described
    for step in (1, 2, 3):
        checkpoint._described = broken if step == 2 else good
        try:
            checkpoints.save(step)
            checkpoints.wait()
        except MeshwrightError as error:
            said.append(str(error))
    checkpoints.close()
    engine.close()
    return said


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_what_goes_wrong_in_the_background_is_raised_on_all_ranks(pool: Pool, tmp_path: Path, bad_rank: int) -> None:
    ranks = pool.run(save_on_a_bad_disk, Run({"pp": 2}, str(tmp_path), 1), bad_rank, ranks=2)
    for said in ranks:
        assert len(said) == 1 and "checkpoint-2 could not be written" in said[0]
        assert f"rank {bad_rank}: OSError: [Errno 28]" in said[0] and "the last good one is checkpoint-1" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"], "no rest of it"
