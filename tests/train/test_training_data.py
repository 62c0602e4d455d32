"""Which rows a step takes, who reads them, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from meshwright import MeshwrightError
from meshwright.train.data.batches import Position, Source, numbered_steps, streamed_steps, without_unused
from meshwright.train.data.collate import Collate, stacked, stand_ins
from meshwright.train.data.sampler import Sampler
from meshwright.train.data.step_rows import StepRows

ROWS = [{"x": i, "labels": -i} for i in range(23)]


def numbers(source: Source, sampler: Sampler, at: Position) -> list[list[int]]:
    return [batch.tensors["x"].tolist() for batch in numbered_steps(source, sampler, at)]  # type: ignore[call-overload]


def source(dataset: Any = ROWS, **more: Any) -> Source:
    return Source(dataset, Collate(stacked, None), 5, **more)


class Stream(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter(ROWS)


class Noisy(IterableDataset[dict[str, float]]):
    """Draws as it goes."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        for _ in range(24):
            yield {"x": float(torch.rand(()))}


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_the_order_is_that_of_the_serial_loader(epoch: int) -> None:
    serial = SeedableRandomSampler(ROWS, data_seed=5)
    serial.set_epoch(epoch)
    assert Sampler(23, StepRows(4, 1, 1), 5).order(epoch) == list(serial)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_copies_share_the_rows_of_every_step(accumulation: int, copies: int, drop_last: bool) -> None:
    sampler = Sampler(23, StepRows(2, accumulation, copies), 5, drop_last=drop_last)
    order = sampler.order(0)
    seen: list[int] = []
    parts = [numbers(source(copy=copy, copies=copies), sampler, Position(0, 0)) for copy in range(copies)]
    for step in range(sampler.steps):
        rows = [row for part in parts for row in part[step]]
        start, stop = sampler.span(step)
        assert rows == order[start:stop]
        seen += rows
    whole = 23 - 23 % (2 * copies) if drop_last else 23
    assert seen == order[:whole]


def test_a_run_goes_on_where_it_stopped() -> None:
    sampler = Sampler(23, StepRows(4, 1, 1), 5)
    whole = numbers(source(), sampler, Position(3, 0))
    assert whole[:2] + numbers(source(), sampler, Position(3, 2)) == whole
    assert sorted(row for rows in whole for row in rows) == list(range(23))
    assert whole != numbers(source(), sampler, Position(4, 0))


@pytest.mark.parametrize("copies", [1, 2])
def test_streams_are_read_in_their_order_and_shared(copies: int) -> None:
    rows = StepRows(3, 1, copies)
    parts = [list(streamed_steps(source(Stream(), copy=copy, copies=copies), rows, Position(0, 0))) for copy in range(copies)]
    found = [row for step in zip(*parts, strict=True) for part in step for row in part.tensors["x"].tolist()]  # type: ignore[call-overload]
    assert found == list(range(23))
    late = list(streamed_steps(source(Stream(), copies=copies), rows, Position(0, 2)))
    assert torch.equal(late[0].tensors["x"], parts[0][2].tensors["x"])  # type: ignore[call-overload]


def test_a_stream_that_draws_draws_the_same_on_all_copies_and_after_a_stop() -> None:
    rows = StepRows(2, 1, 2)

    def read(copy: int, start: int) -> list[torch.Tensor]:
        found = streamed_steps(source(Noisy(), copy=copy, copies=2), rows, Position(0, start))
        return [step.tensors["x"] for step in found]  # type: ignore[call-overload]

    one, two, late = read(0, 0), read(1, 0), read(0, 3)
    assert torch.equal(torch.stack(one[3:]), torch.stack(late))
    drawn = torch.cat([*one, *two])
    assert len(drawn.unique()) == len(drawn) == 24


def test_random_collators_draw_the_same_on_all_ranks_of_a_copy_and_not_elsewhere() -> None:
    def noisy(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(len(rows))}

    sampler = Sampler(24, StepRows(4, 1, 2), 5)

    def drawn(copy: int) -> torch.Tensor:
        at = Source([*ROWS, ROWS[0]], Collate(noisy, None), 5, copy=copy, copies=2)
        return torch.cat([batch.tensors["x"] for batch in numbered_steps(at, sampler, Position(0, 0))])  # type: ignore[call-overload]

    first = drawn(0)
    torch.rand(3)
    assert torch.equal(first, drawn(0)) and not torch.equal(first, drawn(1))


def test_processes_of_a_loader_give_the_same_rows() -> None:
    sampler = Sampler(23, StepRows(4, 1, 1), 5)
    assert numbers(source(processes=1), sampler, Position(0, 1)) == numbers(source(), sampler, Position(0, 1))


def test_a_copy_without_rows_keeps_the_shapes() -> None:
    sampler = Sampler(1, StepRows(1, 1, 2), 5)
    (empty,) = numbered_steps(source([{"x": [1, 2, 3]}], copy=0, copies=2), sampler, Position(0, 0))
    assert empty.tensors["x"].shape == (0, 3)  # type: ignore[call-overload]


def test_columns_that_the_model_does_not_take_are_not_read() -> None:
    found = without_unused(datasets.Dataset.from_list([{"x": 1, "text": "a"}]), frozenset({"x"}))
    assert found.column_names == ["x"]
    with pytest.raises(MeshwrightError, match="has the columns x, text; the model takes y"):
        without_unused(datasets.Dataset.from_list([{"x": 1, "text": "a"}]), frozenset({"y"}))
    with pytest.raises(MeshwrightError, match="the data set has x"):
        Collate(default_data_collator, frozenset({"y"}))([{"x": 1}])
    with pytest.raises(MeshwrightError, match="column 'text' of the batch is not a tensor"):
        Collate(lambda rows: {"text": [row["text"] for row in rows]}, None)([{"text": "a"}])


def test_of_columns_that_others_need_the_shapes_stay() -> None:
    batch = {"input_ids": torch.ones(4, 7, dtype=torch.long), "labels": torch.ones(4, 7, dtype=torch.long)}
    found = stand_ins(batch, frozenset({"labels"}))
    assert found["labels"] is batch["labels"]  # type: ignore[call-overload]
    assert found["input_ids"].shape == (4, 7) and found["input_ids"].is_meta  # type: ignore[call-overload]


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(MeshwrightError, match="0 rows"):
        Sampler(0, StepRows(4, 1, 1), 5)
    with pytest.raises(MeshwrightError, match="drops a batch below 32"):
        Sampler(23, StepRows(32, 1, 1), 5, drop_last=True)
