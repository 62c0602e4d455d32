"""What metrics are given is what the Hugging Face Trainer gives them: all that a model says of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.runtime.launch.workers import Workers
from meshwright.train import job_file as job
from tests.support.tiny_models import SIZES, library
from tests.support.trainers import arguments


class Told(nn.Module):
    """Returns its loss, its scores, and something else, in one of two forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.form = nn.Linear(6, 8), nn.Linear(8, 3), form

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        scores = self.last(hidden)
        loss = nn.functional.cross_entropy(scores, labels)
        if self.form == "tuple":
            return loss, scores, hidden.mean(1)
        return {"loss": loss, "logits": scores, "mean": hidden.mean(1), "table": self.last.weight}


def rows(count: int) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(6, generator=random), "labels": i % 3} for i in range(count)]


def questions(count: int) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 100, (count, 12), generator=random)
    return [{"input_ids": t, "start_positions": i % 4, "end_positions": 5 + i % 3} for i, t in enumerate(tokens)]


def reader() -> nn.Module:
    hf = library()
    torch.manual_seed(0)
    found: nn.Module = hf.BertForQuestionAnswering(hf.BertConfig(**SIZES))
    return found


@pytest.mark.parametrize("form", ["tuple", "mapping", "questions"])
@pytest.mark.parametrize("dropped", [False, True])
def test_predictions_are_those_of_the_hugging_face_trainer(form: str, dropped: bool, tmp_path: Path, workers: Workers) -> None:
    data = questions(7) if form == "questions" else rows(7)
    more = {"per_device_eval_batch_size": 4, "dataloader_drop_last": dropped}
    found = []
    for kind, trainer_kind, own in (
        (transformers.TrainingArguments, transformers.Trainer, {}),
        (mw.TrainingArguments, mw.Trainer, {"workers": workers}),
    ):
        plan = {} if not own else {"parallel": {"pp": 2}}
        model = reader() if form == "questions" else Told(form)
        found.append(trainer_kind(model, arguments(kind, tmp_path, **more, **plan), **own).predict(data))
    count = 2
    for one, other in zip(found[0].predictions[:count], found[1].predictions[:count], strict=True):
        assert one.shape == other.shape and np.allclose(one, other, atol=1e-5)
    assert found[1].metrics["test_loss"] == pytest.approx(found[0].metrics["test_loss"], rel=1e-5)


class Weighted(nn.Module):
    """Classes that count more or less."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("weights", torch.tensor([0.1, 1.0, 5.0]))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.last(torch.tanh(self.first(x)))
        if labels is None:
            return {"logits": scores}
        return {"loss": nn.functional.cross_entropy(scores, labels, weight=self.weights), "logits": scores}


def test_weights_of_classes_count_over_the_whole_batch(tmp_path: Path) -> None:
    found = []
    for plan in (None, {"microbatches": 4}):
        trainer = mw.Trainer(
            Weighted(), arguments(mw.TrainingArguments, tmp_path, max_steps=3, parallel=plan), train_dataset=rows(16)
        )
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_rows_without_labels_are_predicted_after_training(tmp_path: Path) -> None:
    trainer = mw.Trainer(Weighted(), arguments(mw.TrainingArguments, tmp_path, max_steps=1), train_dataset=rows(8))
    trainer.train()
    bare = [{"x": row["x"]} for row in rows(5)]
    found = trainer.predict(bare)
    expected = trainer.model.eval()(torch.stack([row["x"] for row in bare]))["logits"]
    assert np.allclose(found.predictions, expected.detach().numpy(), atol=1e-6) and "test_loss" not in found.metrics
    trainer.train()


def test_numbers_of_a_job_are_numbers() -> None:
    with pytest.raises(MeshwrightError, match="max_steps must be a number, got 'x'"):
        job.arguments({"output_dir": "out", "max_steps": "x"})
    with pytest.raises(MeshwrightError, match="takes 64 tokens per row, not 100"):
        job.Job(model="gpt-tiny", dataset="stdlib", length=100).trainer()
