"""Gradient hooks of parameters: called as in one process, or refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError, Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.stage.layers import Layers
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool
from tests.support.trainers import arguments, gpt2, ours, text

KINDS = ("register_hook", "register_post_accumulate_grad_hook")


def nothing(_: Tensor) -> None:
    """A hook of a post-accumulate kind returns nothing; one of a gradient may."""


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("no worker is started")


def hooked(kind: str = "register_hook") -> nn.Module:
    model = gpt2(tie_word_embeddings=False)
    getattr(model.transformer.wpe.weight, kind)(nothing)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_is_not_lost_on_the_way_to_workers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mw.Trainer, "_workers", never)
    with pytest.raises(MeshwrightError, match=r"transformer\.wpe\.weight has a gradient hook.*local workers(.|\n)*torchrun"):
        ours(hooked(kind), tmp_path, text(16), max_steps=1, parallel={"pp": 2}).train()


def test_a_hook_that_was_removed_is_none(tmp_path: Path) -> None:
    model = gpt2()
    for kind in KINDS:
        getattr(model.transformer.wpe.weight, kind)(nothing).remove()
    trainer = ours(model, tmp_path, text(16), max_steps=1, parallel={"pp": 2})
    trainer.run_on_ranks = never  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="no worker is started"):
        trainer.train()


def test_a_hook_is_called_in_one_process(tmp_path: Path) -> None:
    model = gpt2(tie_word_embeddings=False)
    before = model.transformer.wpe.weight.detach().clone()
    model.transformer.wpe.weight.register_hook(torch.zeros_like)
    ours(model, tmp_path, text(16), max_steps=1, weight_decay=0.0, parallel={"pp": 1, "microbatches": 2}).train()
    assert torch.equal(model.transformer.wpe.weight, before)


def test_a_hook_of_a_sketch_is_refused(tmp_path: Path) -> None:
    words = r"transformer\.wpe\.weight has a gradient hook.*a sketch"
    given = arguments(mw.TrainingArguments, tmp_path, max_steps=1)
    with pytest.raises(MeshwrightError, match=words):
        mw.Trainer(model_init=hooked, args=given, train_dataset=text(16)).train()
    rows = {key: torch.tensor([row[key] for row in text(4)]) for key in ("input_ids", "labels")}
    with pytest.raises(MeshwrightError, match=words):
        mw.parallelize(mw.sketch(hooked), rows, {"pp": 1})


def vectors(_: int) -> tuple[Tensor, Tensor]:
    return torch.ones(8, 4), torch.zeros(8, 4)


def late(schedule: str, tied: bool) -> None:
    """A hook that is set between two steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    if tied:
        layers[3].weight = layers[0].weight
    cut = Layers.of(layers, 2)
    engine = Engine(
        lists_for(Parallel(pp=2, schedule=schedule, microbatches=4), ties=cut.ties), cut, Settings(momentum, microbatches=4)
    )
    engine.run(vectors)
    layers[0].weight.register_hook(nothing)
    engine.run(vectors, 1)


@pytest.mark.parametrize(
    ("schedule", "tied", "words"),
    [("zero_bubble", False, "has a gradient hook, which would not be called"), ("onef1b", True, "is shared by stages 0 and 1")],
)
def test_a_late_hook_is_refused_where_it_cannot_act(pool: Pool, schedule: str, tied: bool, words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        pool.run(late, schedule, tied, ranks=2)
    pool.close()
