"""Packed sequences: several texts in a row, told apart by position ids that restart."""

from __future__ import annotations

import copy
import itertools
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.capture.trace.export import flatten
from meshwright.train.setup.captured_layers import through
from tests.conftest import Pool
from tests.support.captured_models import VOCABULARY, llama
from tests.support.layers_of_models import layers_for

LENGTH = 16


def packed(step: int, rows: int = 8, length: int = LENGTH) -> dict[str, Tensor]:
    """Three texts in each row; the first label of a text is not predicted."""
    drawn = torch.Generator().manual_seed(step + 1)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=drawn)
    positions, labels = torch.zeros_like(tokens), tokens.clone()
    for row in range(rows):
        cuts = sorted((torch.randperm(length - 3, generator=drawn)[:2] + 2).tolist())
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            positions[row, start:stop] = torch.arange(stop - start)
            labels[row, start] = -100
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def each_alone(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """The loss of every text by itself: what packing must equal."""
    total, count = 0.0, 0
    for tokens, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, stop in itertools.pairwise(starts):
            text = tokens[None, start:stop]
            scores = model(input_ids=text).logits[0, :-1]
            total += float(nn.functional.cross_entropy(scores, text[0, 1:], reduction="sum"))
            count += stop - start - 1
    return total / count


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_do_not_see_each_other_across_stages(attention: str) -> None:
    torch.manual_seed(0)
    model = llama(attn_implementation=attention).eval()
    flat = flatten(model, packed(0))
    layers = layers_for(model, packed(0), 2, flat=flat)
    for layer in layers.modules:
        layer.eval()
    with torch.no_grad():
        for step, rows, length in ((0, 8, LENGTH), (1, 3, 11), (2, 1, 13)):
            batch = packed(step, rows, length)
            found = float(through(layers, batch)[0])
            assert found == pytest.approx(float(model(**batch, use_cache=False).loss), rel=1e-6)
            assert found == pytest.approx(each_alone(model, batch), rel=1e-5)
        unpacked = {**packed(0), "position_ids": torch.arange(LENGTH).expand(8, LENGTH)}
        assert float(through(layers, unpacked)[0]) != pytest.approx(float(through(layers, packed(0))[0]), rel=1e-5)


def test_a_packed_llama_trains_on_two_stages_as_in_one_process(pool: Pool) -> None:
    certificate = pool.verify(llama, packed, pp=2, microbatches=4, steps=3)
    assert certificate.passed
    torch.manual_seed(0)
    model = llama().double()
    with torch.no_grad():
        assert certificate.losses[0] == pytest.approx(each_alone(model, packed(0)), rel=1e-6)


TEXTS = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in (5, 9, 7, 6)]


def trainer(folder: Path, **more: Any) -> mw.Trainer:
    from transformers import DataCollatorWithFlattening

    args = mw.TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=4, parallel={"microbatches": 2}, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return mw.Trainer(llama(), args, train_dataset=TEXTS, data_collator=DataCollatorWithFlattening(**more))


def test_columns_of_flash_attention_are_named(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"'cu_seq_lens_q'.*\n.*return_flash_attn_kwargs=False"):
        trainer(tmp_path, return_flash_attn_kwargs=True).train()


def test_one_flattened_row_trains_right_and_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = trainer(tmp_path)
    model = copy.deepcopy(found.model)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        output = found.train()
    assert "puts 4 samples into one row" in caplog.text and "1 of 2 are empty" in caplog.text
    batch = partial(found.data_collator, TEXTS)()
    assert output.training_loss == pytest.approx(float(model(**batch, use_cache=False).loss.detach()), rel=1e-5)


def test_a_cache_that_hides_packing_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    for cached in (True, False):
        model = llama(use_cache=cached)
        caplog.clear()
        with mw.parallelize(model, packed(0), {"pp": 1}, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)):
            assert ("detects packed sequences only without a cache" in caplog.text) == cached
