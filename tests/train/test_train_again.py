"""A further `train()` of the same trainer does what Hugging Face's does; a loss that is no number is never logged as 0."""

from __future__ import annotations

import logging
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.runtime.launch.workers import Workers
from tests.support.thin import slow
from tests.support.trainers import Plain, arguments, distance, gpt2, no_numbers, ours, series, text, vectors

COMMON: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-2, "max_grad_norm": 0.5}


def theirs(tmp_path: Path, **more: Any) -> transformers.Trainer:
    args = arguments(transformers.TrainingArguments, tmp_path, use_cpu=True, **COMMON)
    return transformers.Trainer(**{"model": None if more else gpt2(), "args": args, "train_dataset": text(), **more})


@pytest.mark.parametrize("plan", [None, slow({"pp": 2}), {"pp": 2, "schedule": "chimera"}], ids=str)
def test_the_optimizer_goes_on_and_learning_rates_start_anew(plan: Any, tmp_path: Path, workers: Workers) -> None:
    reference, model, logs = theirs(tmp_path), gpt2(), list[Any]()
    trainer = ours(model, tmp_path, text(), workers, parallel=plan, **COMMON)
    for one in (reference, reference, trainer, trainer):  # not in turns: both draw from the generator of this process
        one.train()
        logs.append({key: series(one.state.log_history, key) for key in ("loss", "grad_norm", "learning_rate")})
    for wanted, found in ((logs[0], logs[2]), (logs[1], logs[3])):
        for key in wanted:
            assert found[key] == pytest.approx(wanted[key], rel=1e-4), key
    assert trainer.state.global_step == 3
    assert distance(model, reference.model) < 2e-4


def built() -> Any:
    return gpt2()


def test_model_init_builds_a_new_model(tmp_path: Path) -> None:
    args = arguments(mw.TrainingArguments, tmp_path, **COMMON)
    trainer = mw.Trainer(model_init=built, args=args, train_dataset=text())
    logs = []
    for _ in range(2):
        trainer.train()
        logs.append(series(trainer.state.log_history, "loss"))
    assert logs[0] == logs[1]


def test_a_sketch_is_not_trained_twice(tmp_path: Path) -> None:
    trainer = ours(mw.sketch(gpt2), tmp_path, text(), **COMMON)
    trainer.train()
    with pytest.raises(MeshwrightError, match="its optimizer state was not kept"):
        trainer.train()


def test_a_schedule_of_the_user_goes_on(tmp_path: Path, workers: Workers) -> None:
    found = []
    for kind in ("theirs", "ours", "workers"):
        model = gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pair = (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
        if kind == "theirs":
            trainer: Any = theirs(tmp_path, model=model, optimizers=pair)
        else:
            plan = {"pp": 2} if kind == "workers" else None
            trainer = ours(model, tmp_path, text(), workers, parallel=plan, optimizers=pair, **COMMON)
        logs = []
        for _ in range(2):
            trainer.train()
            logs += [*series(trainer.state.log_history, "loss"), *series(trainer.state.log_history, "learning_rate")]
        found.append(logs)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


def test_a_step_without_a_number_is_said_and_not_logged_as_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_steps": 2, "per_device_train_batch_size": 8}
    with caplog.at_level(logging.WARNING):
        torch.manual_seed(0)
        trainer = ours(Plain(), tmp_path, no_numbers(), logging_steps=1, **more)
        trainer.train()
    first, second = series(trainer.state.log_history, "loss")
    assert first > 0 and isnan(second)
    assert "the loss of step 2 is nan" in caplog.text
    torch.manual_seed(0)
    filtered = ours(Plain(), tmp_path, no_numbers(), logging_steps=2, **more)
    filtered.train()
    assert series(filtered.state.log_history, "loss") == pytest.approx([0.75 * first])  # Hugging Face's formula


def test_a_run_without_any_number_has_no_loss(tmp_path: Path) -> None:
    rows = [{**row, "x": row["x"] * float("nan")} for row in vectors(8)]
    assert isnan(ours(Plain(), tmp_path, rows, max_steps=1, num_train_epochs=1).train().training_loss)


def test_what_does_not_train_leaves_divided_parameters_whole(tmp_path: Path) -> None:
    """In one process and under torchrun the model is the user's own: it is read, and trained, after an evaluation."""
    plain, model, first = gpt2(), gpt2(), gpt2()
    losses = []
    for trained, mode in ((plain, "replicated"), (model, "zero-3")):
        how = {"parallel": {"dp": 1, "dp_mode": mode}, "max_steps": 2, "eval_dataset": text(5)}
        trainer = ours(trained, tmp_path, text(16), **how)
        before = trainer.evaluate()["eval_loss"]
        trainer.predict(text(3))
        trainer.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
        assert distance(trained, first) == 0.0
        trainer.train()
        losses.append([before, *series(trainer.state.log_history, "loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert distance(plain, model) < 1e-6
