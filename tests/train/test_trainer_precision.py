"""Mixed precision in the Trainer: bf16 as Hugging Face's in one process, fp16 with a scale that a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.runtime.launch.workers import Workers
from tests.support.trainers import gpt2, ours, reference, series, text


@pytest.mark.slow
def test_bf16_losses_are_those_of_the_hugging_face_trainer(tmp_path: Path, workers: Workers) -> None:
    log = reference(gpt2(), tmp_path / "hf", text(), bf16=True)
    trainer = ours(gpt2(), tmp_path / "mw", text(), workers, parallel={"pp": 2}, bf16=True)
    trainer.train()
    plain = ours(gpt2(), tmp_path / "fp32", text(), workers, parallel={"pp": 2})
    plain.train()
    assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=5e-3)
    assert series(trainer.state.log_history, "loss") != pytest.approx(series(plain.state.log_history, "loss"), rel=1e-6)


def test_fp16_trains_and_resumes_with_its_scale(tmp_path: Path, workers: Workers) -> None:
    whole = ours(gpt2(), tmp_path / "whole", text(), workers, parallel={"pp": 2}, fp16=True, save_steps=2, save_strategy="steps")
    whole.train()
    first = sorted((tmp_path / "whole").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))[0]
    again = ours(gpt2(), tmp_path / "again", text(), workers, parallel={"pp": 2}, fp16=True)
    again.train(resume_from_checkpoint=str(first))
    found, expected = series(again.state.log_history, "loss"), series(whole.state.log_history, "loss")
    assert found and found == pytest.approx(expected[-len(found) :], rel=1e-5)
