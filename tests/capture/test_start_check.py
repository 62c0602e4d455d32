"""The check at the start: captured layers are the user's model, or an error says why not."""

from __future__ import annotations

import copy
import logging
import os
import random
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.capture.check.check_result import Verdict
from meshwright.capture.check.start_check import compare
from meshwright.capture.trace.export import flatten
from meshwright.runtime.stage.precision import Precision
from meshwright.train.setup.check_capture import Start, check_start, verdict_of
from tests.conftest import Pool
from tests.support import hard_models as hard
from tests.support.layers_of_models import layers_for
from tests.support.paths import ROOT

STEPS, RATE = 3, 0.1


def plain_losses(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    """The model itself, whole batches, plain SGD."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    random.seed(5)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**{name: t.clone() for name, t in batch.items()})[0]
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def verdict(model: nn.Module, batch: Any, *, stages: int = 1) -> Verdict:
    flat = flatten(model, batch)
    layers = layers_for(model, batch, stages, flat=flat)
    return compare(model, layers.modules, layers.starts, flat, batch)


def in_steps(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    kind, batch = hard.CASES[name]
    return kind(), [batch(8, step=step) for step in range(STEPS)]


@pytest.mark.parametrize("name", hard.CASES)
def test_a_session_trains_the_model_or_refuses_it(name: str) -> None:
    model, batches = in_steps(name)
    reference = plain_losses(copy.deepcopy(model), batches)
    example = {key: t[:4] for key, t in batches[0].items()}
    plan = {"pp": 1, "microbatches": 2}
    try:
        with mw.parallelize(model, example, plan, optimizer=torch.optim.SGD(model.parameters(), lr=RATE)) as session:
            found = [session.step(batch).loss for batch in batches]
    except MeshwrightError as error:
        assert re.search(hard.REFUSED[name], str(error))
    else:
        assert name not in hard.REFUSED and found == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("name", hard.CASES)
def test_a_trainer_trains_the_model_or_refuses_it(name: str, tmp_path: Path) -> None:
    model, batches = in_steps(name)
    reference = plain_losses(copy.deepcopy(model), batches)
    rows = [{key: t[i] for key, t in batch.items()} for batch in batches for i in range(8)]
    args = mw.TrainingArguments(
        str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=RATE,
        lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    try:
        trainer = mw.Trainer(model, args, train_dataset=rows)
        trainer.train()
    except MeshwrightError as error:
        assert re.search(hard.REFUSED[name], str(error))
    else:
        assert name not in hard.REFUSED
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert found == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize("name", hard.CASES)
def test_verify_passes_what_trains_right_and_refuses_the_rest(name: str, pool: Pool) -> None:
    kind, batch = hard.CASES[name]
    try:
        found = pool.verify(kind, partial(batch_of_step, batch), pp=1, microbatches=2, steps=2)
    except MeshwrightError as error:
        assert re.search(hard.REFUSED[name], str(error))
    else:
        assert name not in hard.REFUSED and found.passed


def batch_of_step(batch: Any, step: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = batch(8, step=step)
    return found


@pytest.mark.parametrize("kind", [hard.Base, hard.Normed, hard.Noisy, hard.Dropping])
@pytest.mark.parametrize("stages", [1, 2])
def test_equal_models_are_found_equal_to_the_bit(kind: type[nn.Module], stages: int) -> None:
    found = verdict(kind(), hard.features(4), stages=stages)
    assert found.training is None and found.evaluation is None and found.refused is None
    assert found.largest == 0.0
    assert sum("training" in run for run in found.runs) >= 2 and sum("evaluation" in run for run in found.runs) == 3


def test_draws_in_evaluation_are_reported_and_no_difference() -> None:
    assert verdict(hard.Noisy(), hard.features(4)).draws_in_evaluation
    assert not verdict(hard.Dropping(), hard.features(4)).draws_in_evaluation


class Wrong(hard.Base):
    """Computes something else behind its third layer once it was captured."""

    wrong = False

    def body(self, x: Tensor) -> Tensor:
        """A layer that changes."""
        x = torch.tanh(self.layers[0](self.first(x)))
        x = torch.tanh(self.layers[1](x + 1e-3 if self.wrong else x))
        return torch.tanh(self.layers[2](x))


def test_the_first_layer_that_differs_is_named() -> None:
    torch.manual_seed(0)
    model, batch = Wrong(), hard.features(4)
    flat = flatten(model, batch)
    layers = layers_for(model, batch, 2, flat=flat)
    model.wrong = True
    found = compare(model, layers.modules, layers.starts, flat, batch)
    assert found.training is not None and found.training.layer == "the output of layers.1"
    assert "the first layer that differs: the output of layers.1" in str(found.training.error())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (hard.Counting, "Counting.n changes with every forward"),
        (hard.PythonRandom, "the forward draws from random"),
        (hard.Listing, "differs from itself"),
    ],
)
def test_python_state_is_refused_by_name(kind: type[nn.Module], told: str) -> None:
    model = kind()
    with pytest.raises(MeshwrightError, match=told):
        mw.parallelize(model, hard.features(4), {"pp": 1, "microbatches": 2})


def test_everything_is_afterwards_what_it_was() -> None:
    torch.manual_seed(3)
    model = hard.Listing()
    model.norm, model.n = nn.BatchNorm1d(hard.WIDTH), 4
    model.layers[1].eval()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate()
    verdict(model, hard.features(4))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert model.seen == [] and model.n == 4
    assert model.training and not model.layers[1].training
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight)) and model.head.weight.grad is None
    assert not model.first._forward_hooks and not getattr(model.first.weight, "_post_accumulate_grad_hooks", None)


def test_a_size_that_the_model_itself_refuses_is_no_difference() -> None:
    found = verdict(hard.Normed(), hard.features(4))
    assert any("the model itself fails in training at x 1x6" in note for note in found.notes)
    assert found.training is None


def test_evaluation_that_differs_has_a_graph_of_its_own() -> None:
    model, batches = in_steps("modes")
    with mw.parallelize(model, batches[0], {"pp": 1, "microbatches": 2}) as session:
        for batch in batches:
            session.step(batch)
            model.eval()
            with torch.no_grad():
                wanted = float(model(**batch)[0])
            assert session.evaluate(batch).loss == pytest.approx(wanted, rel=1e-5)


def test_a_trainer_evaluates_what_the_model_does_in_evaluation(tmp_path: Path, workers: Any) -> None:
    model, batches = in_steps("modes")
    rows = [{key: t[i] for key, t in batches[0].items()} for i in range(8)]
    args = mw.TrainingArguments(
        str(tmp_path), parallel={"pp": 2}, max_steps=1, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = mw.Trainer(model, args, train_dataset=rows, eval_dataset=rows, workers=workers)
    trainer.train()
    found = trainer.evaluate()["eval_loss"]
    model.eval()
    with torch.no_grad():
        assert found == pytest.approx(float(model(**batches[0])[0]), rel=1e-5)


class Refuses(hard.Modes):
    """Cannot be captured in evaluation, where it branches on values."""

    def body(self, x: Tensor) -> Tensor:
        """Another way where the sum is positive."""
        x = super().body(x)
        return x if self.training or x.sum() > 0 else 2 * x


def test_evaluation_that_cannot_be_captured_is_refused_where_somebody_evaluates() -> None:
    batch = hard.features(8)
    with mw.parallelize(Refuses(), batch, {"pp": 1, "microbatches": 2}) as session:
        session.step(batch)
        with pytest.raises(MeshwrightError, match=r"evaluation differs from training: `if self.training` in Refuses"):
            session.evaluate(batch)


def test_the_check_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    model = hard.Counting()
    with mw.parallelize(model, hard.features(4), {"pp": 1, "microbatches": 2}, check_capture=False) as session:
        assert session.step(hard.features(4)).loss > 0


def test_a_sketch_is_filled_for_the_check_and_stays_empty(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    from meshwright.train.setup import check_capture as start

    for free in (1 << 40, 0):
        monkeypatch.setattr(start, "free_bytes", lambda free=free: free)
        sketch = mw.sketch(hard.Normed)
        flat = flatten(sketch.model, hard.features(4))
        with caplog.at_level(logging.INFO, logger="meshwright"):
            assert start.check_start(start.Start(sketch, flat, hard.features(4), stages=2)) == start.Evaluation()
        assert "captured layers equal the model" in caplog.text
        assert all(p.is_meta for p in sketch.model.parameters())
        caplog.clear()


def test_a_model_that_is_too_large_is_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    from meshwright.train.setup import check_capture as start

    monkeypatch.setattr(start, "TOO_LARGE", 10)
    flat = flatten(hard.Counting(), hard.features(4))
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert start.check_start(start.Start(hard.Counting(), flat, hard.features(4))) == start.Evaluation()
    assert "start check: skipped" in caplog.text


@pytest.mark.parametrize(("kind", "told"), [("Counting", "Counting.n changes with every forward"), ("Modes", "1.")])
def test_every_rank_of_torchrun_finds_the_same(kind: str, told: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.support.torchrun_check", kind]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.removeprefix("rank ").split(": ", 1) for line in done.stdout.splitlines())
    assert set(said) == {"0", "1"} and said["0"] == said["1"] and said["0"].startswith(told)


@pytest.mark.slow
def test_the_check_costs_less_than_a_tenth_of_a_demo_run(tmp_path: Path, monkeypatch: Any) -> None:
    from meshwright.train import prepared as module
    from meshwright.train.job_file import Job

    spent, check = [], module.check_start

    def timed(*args: Any) -> Any:
        begun = time.perf_counter()
        found = check(*args)
        spent.append(time.perf_counter() - begun)
        return found

    monkeypatch.setattr(module, "check_start", timed)
    arguments = {"output_dir": str(tmp_path), "max_steps": 30, "per_device_train_batch_size": 16, "report_to": "none"}
    begun = time.perf_counter()
    Job("gpt-small", parallel={"pp": 4, "schedule": "chimera", "microbatches": 4}, arguments=arguments).trainer().train()
    whole = time.perf_counter() - begun
    print(f"the check took {spent[0]:.2f} s of {whole:.2f} s: {spent[0] / whole:.1%}")
    assert len(spent) == 1 and spent[0] < 0.1 * whole


class _Subtracts(hard.Base):
    """A moving average that only evaluation reads; before the first step it is zero, and hides that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def body(self, x: Tensor) -> Tensor:
        found = super().body(x)
        if self.training:
            self.average.mul_(0.9).add_(0.1 * found.detach().mean(0))
            return found
        return found - self.average


class _Gated(hard.Base):
    """A gate that starts at zero hides what is behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def body(self, x: Tensor) -> Tensor:
        found = super().body(x)
        return found + self.gate * torch.tanh(found) * (0.5 if self.training else 1.0)


@pytest.mark.parametrize("kind", [_Subtracts, _Gated])
def test_values_that_start_alike_hide_nothing(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, batches = kind(), [hard.features(8, step=step) for step in range(STEPS)]
    start = {name: t.clone() for name, t in model.state_dict().items()}
    reference = copy.deepcopy(model)
    plain_losses(reference, batches)
    plan = {"pp": 1, "microbatches": 1}
    with mw.parallelize(model, batches[0], plan, optimizer=torch.optim.SGD(model.parameters(), lr=RATE)) as session:
        assert all(torch.equal(t, start[name]) for name, t in model.state_dict().items())
        for batch in batches:
            session.step(batch)
        found = session.evaluate(batches[0]).loss
    reference.eval()
    assert found == pytest.approx(float(reference(**batches[0])[0].detach()), rel=1e-5)


class _AsksDtype(hard.Base):
    """Does something else in half precision, which a trace in single precision does not see."""

    def body(self, x: Tensor) -> Tensor:
        found = super().body(x)
        return found * 2 if found.dtype == torch.bfloat16 else found


@pytest.mark.parametrize("model", [hard.Base, _AsksDtype])
def test_what_autocast_changes_is_found_where_layers_run_under_it(model: type[hard.Base]) -> None:
    torch.manual_seed(0)
    made, batch = model(), hard.features(8)
    flat = flatten(made, batch)
    assert check_start(Start(made, flat, batch)).refused is None, "in single precision both are right"
    bf16 = Start(made, flat, batch, precision=Precision.of("bf16"))
    checked = verdict_of(bf16)
    assert checked is not None and any(run.startswith("training under bfloat16") for run in checked[0].runs)
    if model is _AsksDtype:
        with pytest.raises(
            MeshwrightError, match=r"(?s)the captured layers differ from the model.*only under autocast to bfloat16"
        ):
            check_start(bf16)
    else:
        check_start(bf16)


class _SeldomDraws(hard.Base):
    """Draws in training alone, between choices that are hardly ever close enough for it to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.chooser = nn.Linear(hard.WIDTH, 4)

    def body(self, x: Tensor) -> Tensor:
        found = super().body(x)
        scores = self.chooser(found) * 1e6
        if self.training:
            scores = scores + torch.rand_like(scores)
        return found * (1 + scores.argmax(-1, keepdim=True))


def test_a_training_graph_that_draws_is_not_used_for_an_evaluation_that_does_not() -> None:
    """No example shows the difference; the draws do."""
    torch.manual_seed(0)
    model, batch = _SeldomDraws(), hard.features(8)
    found = check_start(Start(model, flatten(model, batch), batch))
    assert found.refused is None and found.graph is not None
    assert found.graph.training is False and not found.graph.random
