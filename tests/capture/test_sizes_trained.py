"""Models whose graph depends on lengths, or on the mode, train and evaluate as they do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.stage.graphs_by_size import MOST
from tests.capture.test_sizes import Deep, tokens
from tests.support.trainers import distance, ours, reference, series

CLOSE = 1e-5


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Rows padded to the longest of them."""
    longest = max(len(row["ids"]) for row in rows)
    ids = [row["ids"] + [0] * (longest - len(row["ids"])) for row in rows]
    labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def uneven(count: int) -> list[dict[str, list[int]]]:
    """Rows of 3 to 9 tokens."""
    rows = [[(3 * i + k * k) % 11 for k in range(3 + (i // 3) % 7)] for i in range(count)]
    return [{"ids": row, "labels": row} for row in rows]


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


@pytest.mark.parametrize("plan", [{"pp": 2}, {"pp": 2, "schedule": "chimera"}], ids=str)
def test_padded_batches_equal_the_hugging_face_trainer(plan: Any, tmp_path: Path, workers: Workers) -> None:
    more: dict[str, Any] = {"data_collator": padded, "eval_dataset": uneven(12), "eval_strategy": "epoch", "num_train_epochs": 1}
    expected, model = deep(), deep()
    log = reference(expected, tmp_path / "a", uneven(44), **more)
    trainer = ours(model, tmp_path / "b", uneven(44), workers, parallel=plan, **more)
    trainer.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series(trainer.state.log_history, key) == pytest.approx(series(log, key), rel=CLOSE), key
    assert distance(model, expected) < 2e-4


def test_the_oldest_graphs_are_forgotten() -> None:
    model = deep()
    with mw.parallelize(model, tokens(4, 6), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0)) as session:
        for length in [*range(3, 3 + MOST + 4), 4]:
            batch = tokens(4, length)
            assert session.step(batch).loss == pytest.approx(float(model(**batch)[0]), rel=CLOSE)
            assert session.evaluate(batch).loss == pytest.approx(float(model(**batch)[0]), rel=CLOSE)
        assert len({id(layer) for layer in session.engine.graphs.modules}) <= MOST * len(session.layers.modules)


class Neighbours(nn.Module):
    """Every row is compared with the one before it: a single row has none, which is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        h = self.first(x)
        h = h + torch.cat([h[:1], h[:-1]]) if h.shape[0] > 1 else h
        return (((self.last(h).squeeze(-1) - labels) ** 2).mean(),)


def test_rows_of_the_last_step_are_looked_at_before_the_first(tmp_path: Path) -> None:
    rows = [{"x": [float(i + k) for k in range(8)], "labels": float(i)} for i in range(21)]
    more = {"parallel": {"microbatches": 4}, "num_train_epochs": 1, "per_device_train_batch_size": 16}
    with pytest.raises(mw.MeshwrightError, match=r"a step of 5 rows has microbatches of [12]"):
        ours(Neighbours(), tmp_path, rows, None, **more).train()
