"""Mixed precision in the Trainer: bf16 as Hugging Face's in one process, fp16 with a scale that a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.runtime.launch.workers import Workers
from tests.support.trainers import distance, gpt2, ours, reference, series, text


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


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "bar"), [("bf16", 1e-3), ("fp16", 1e-4)])
def test_divided_state_has_the_bits_of_whole_copies(compute: str, bar: float, tmp_path: Path, workers: Workers) -> None:
    """One microbatch on the same stages. The loss is that of Hugging Face in one process, as far as the format goes."""
    plan = {"dp": 2, "microbatches": 1, "schedule": "interleaved", "options": {"chunks": 4}}
    how = {compute: True, "num_train_epochs": 1}
    log = reference(gpt2(tie_word_embeddings=False), tmp_path / "hf", text(), **how)
    models = []
    for mode in ("replicated", "zero-1", "zero-2", "zero-3"):
        models.append(gpt2(tie_word_embeddings=False))
        given = {"parallel": {**plan, "dp_mode": mode}, "per_device_train_batch_size": 4, **how}
        trainer = ours(models[-1], tmp_path / mode, text(), workers, **given)
        trainer.train()
        assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=bar)
        assert distance(models[-1], models[0]) == 0.0, mode
