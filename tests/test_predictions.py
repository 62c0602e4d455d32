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
from meshwright.runtime.launch import Workers
from tests.tiny import SIZES, library
from tests.trainers import arguments


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
