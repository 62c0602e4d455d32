"""Ids that a model has no row for are refused by column, id and size, in every entry, before a rank runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.capture.trace.export import flatten
from meshwright.train.data.vocabulary import Vocabulary, vocabularies
from tests.support.trainers import gpt2, llama, ours, text


def rows(column: str, value: int, at: int = 0, count: int = 16) -> list[dict[str, Tensor]]:
    """Rows of text, of which one has another id."""
    found = [{key: torch.as_tensor(v).clone() for key, v in row.items()} for row in (text()[i] for i in range(count))]
    found[at][column][1] = value
    return found


@pytest.mark.parametrize("build", [gpt2, llama])
def test_tables_are_read_from_the_graph(build: Any) -> None:
    example = {name: torch.zeros(2, 6, dtype=torch.int64) for name in ("input_ids", "labels")}
    found = set(vocabularies(flatten(build(), example)))
    assert found == {Vocabulary("input_ids", 256), Vocabulary("labels", 256, -100)}


class Table(nn.Module):
    """Two tables of different sizes read parts of one column; what is computed is nobody's id."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.wrapped = nn.Embedding(4, 8), nn.Embedding(100, 8), nn.Embedding(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Something from each."""
        return (self.small(x[:, 0]) + self.large(x[:, 1]) + self.wrapped(y % 8)).sum(-1).square().mean()


def test_parts_of_a_column_and_computed_ids_are_left_alone() -> None:
    flat = flatten(Table(), {"x": torch.zeros(3, 2, dtype=torch.int64), "y": torch.zeros(3, dtype=torch.int64)})
    assert vocabularies(flat) == ()


@pytest.mark.parametrize("at", [0, 12], ids=["in the example", "later"])
@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("input_ids", 256, "column 'input_ids' has the id 256 .*the model's vocabulary has 256: ids are from 0 to 255"),
        ("input_ids", -1, "column 'input_ids' has the id -1"),
        ("labels", 300, "column 'labels' has the id 300 .*and -100 is ignored"),
    ],
)
def test_a_trainer_refuses(column: str, value: int, words: str, at: int, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=words):
        ours(gpt2(), tmp_path, rows(column, value, at)).train()


@pytest.mark.slow
def test_workers_are_told_the_same(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="column 'input_ids' has the id 999"):
        ours(gpt2(), tmp_path, rows("input_ids", 999, at=12), parallel={"pp": 2}).train()


def test_an_own_loop_refuses_in_every_call() -> None:
    good = {key: torch.stack([row[key] for row in rows("input_ids", 1)]) for key in ("input_ids", "labels")}
    bad = {**good, "input_ids": good["input_ids"].clone().fill_(256)}
    with pytest.raises(MeshwrightError, match="has the id 256"):
        mw.parallelize(gpt2(), bad, {"pp": 1})
    with mw.parallelize(gpt2(), good, {"pp": 1}) as session:
        for call in (
            lambda: session.step(bad),
            lambda: session.evaluate(bad),
            lambda: session.generate(bad["input_ids"], max_new_tokens=1),
        ):
            with pytest.raises(MeshwrightError, match="column 'input_ids' has the id 256 in row 0 of the batch"):
                call()
        assert session.step(good).loss > 0


def late(step: int) -> dict[str, Tensor]:
    """The second batch has an id that the model does not know."""
    found = rows("input_ids", 256 if step else 1, count=4)
    return {key: torch.stack([row[key] for row in found]) for key in ("input_ids", "labels")}


def small() -> nn.Module:
    model: nn.Module = gpt2()
    return model


def test_verify_refuses(workers: Any) -> None:
    with pytest.raises(MeshwrightError, match="column 'input_ids' has the id 256"):
        mw.verify(small, late, {"pp": 2}, steps=2, workers=workers)
