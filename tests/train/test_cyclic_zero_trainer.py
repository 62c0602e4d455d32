"""The Trainer under `dp_mode="cyclic-zero"`: evaluation, checkpoints and resume, bit-equal to the delayed rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.runtime.launch.workers import Workers
from tests.support.trainers import distance, gpt2, ours, series, text
from tests.train.test_cyclic_trainer import PLAN, STEPS, same, serial, trainer

ZERO = {**PLAN, "dp_mode": "cyclic-zero"}
__all__ = ["serial"]


@pytest.mark.slow
def test_logs_evaluation_checkpoints_and_resume(serial: Any, tmp_path: Path, workers: Workers) -> None:
    expected, losses = serial
    model = gpt2()
    run = trainer(tmp_path, workers, model, parallel=ZERO, eval_dataset=text(12), eval_strategy="steps", eval_steps=4)
    output = run.train()
    assert same(model, expected), distance(model, expected)
    assert output.training_loss == pytest.approx(sum(losses) / STEPS, rel=1e-6)
    plain = ours(model, tmp_path / "plain", text(12), per_device_eval_batch_size=16).evaluate(text(12))
    assert series(run.state.log_history, "eval_loss")[-1] == pytest.approx(plain["eval_loss"], rel=1e-6)
    for step, parallel in ((5, ZERO), (10, PLAN)):
        again = gpt2(seed=5)
        resumed = trainer(tmp_path, workers, again, parallel=parallel, logging_steps=1)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert same(again, expected), distance(again, expected)
