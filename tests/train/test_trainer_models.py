"""What else a script may bring: frozen parameters, LoRA, plain modules, own optimizers, streams; and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.runtime.launch.workers import Workers
from meshwright.train.models.small_models import gpt, text_batch
from meshwright.train.setup.where import refuse_world
from tests.support.thin import slow
from tests.support.trainers import Plain, arguments, distance, gpt2, ours, reference, series, summed_loss, text, vectors

CLOSE = 1e-5


def test_frozen_parameters_stay_as_they_are(tmp_path: Path, workers: Workers) -> None:
    expected, model = gpt2(), gpt2()
    for one in (expected, model):
        one.transformer.wte.requires_grad_(False)  # tied to the head, on the last stage
        one.transformer.h[1].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    log = reference(expected, tmp_path, text(), max_steps=4)
    trainer = ours(model, tmp_path, text(), workers, parallel={"pp": 2}, max_steps=4)
    trainer.train()
    assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=CLOSE)
    assert series(trainer.state.log_history, "grad_norm") == pytest.approx(series(log, "grad_norm"), rel=CLOSE)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad), name


def adapted() -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, r=2, init_lora_weights=False)
    return peft.get_peft_model(gpt2(), config)


@pytest.mark.parametrize("plan", [{"pp": 2, "schedule": "chimera"}, {"tp": 2, "pp": 2, "overlap": True}], ids=str)
def test_adapters_of_peft_are_trained_and_nothing_else(tmp_path: Path, workers: Workers, plan: dict[str, Any]) -> None:
    expected, model = adapted(), adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    log = reference(expected, tmp_path / "hf", text(), max_steps=4)
    trainer = ours(model, tmp_path, text(), workers, parallel=plan, max_steps=4)
    trainer.train()
    assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=CLOSE)
    assert distance(model, expected) < 1e-4
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora" in name for name in changed)
    trainer.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "adapter")
    rows = torch.tensor([row["input_ids"] for row in text(4)])
    assert torch.allclose(model.eval()(rows).logits, again.eval()(rows).logits, atol=1e-5)


@pytest.mark.parametrize("plan", [{"pp": 2, "dp": 2}, {"pp": 3, "schedule": "gpipe"}], ids=str)
def test_a_plain_module_trains(plan: Any, tmp_path: Path, workers: Workers) -> None:
    torch.manual_seed(0)
    expected = Plain()
    torch.manual_seed(0)
    model = Plain()
    log = reference(expected, tmp_path, vectors(), max_steps=5)
    device = 8 // plan.get("dp", 1)
    trainer = ours(model, tmp_path, vectors(), workers, parallel=plan, max_steps=5, per_device_train_batch_size=device)
    trainer.train()
    assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=CLOSE)
    assert distance(model, expected) < 1e-4
    trainer.save_model(str(tmp_path / "plain"))
    assert (tmp_path / "plain" / "model.safetensors").exists()


def own_optimizer(model: torch.nn.Module) -> tuple[Any, Any]:
    params = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": params[:3], "lr": 0.5}, {"params": params[3:]}], lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_own_optimizers_keep_their_groups_and_their_schedule(tmp_path: Path, workers: Workers) -> None:
    expected, model = gpt2(), gpt2()
    theirs = transformers.Trainer(
        expected,
        arguments(transformers.TrainingArguments, tmp_path, max_steps=5),
        train_dataset=text(),
        optimizers=own_optimizer(expected),
    )  # type: ignore[arg-type]
    theirs.train()
    trainer = ours(model, tmp_path, text(), workers, parallel={"pp": 2}, max_steps=5, optimizers=own_optimizer(model))
    trainer.train()
    for key in ("loss", "learning_rate"):
        found = series(trainer.state.log_history, key)
        assert found == pytest.approx(series(theirs.state.log_history, key), rel=CLOSE), key
    assert distance(model, expected) < 1e-5


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(text(20))


def test_streams_are_trained_on_again_and_again(tmp_path: Path, workers: Workers) -> None:
    log = reference(gpt2(), tmp_path, Stream(), max_steps=6)
    trainer = ours(gpt2(), tmp_path, Stream(), workers, parallel={"pp": 2}, max_steps=6)
    trainer.train()
    assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=CLOSE)
    with pytest.raises(MeshwrightError, match="the length of an iterable data set is unknown"):
        ours(gpt2(), tmp_path, Stream()).train()


class Changed(mw.Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        """Never called."""


def test_what_a_trainer_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshwrightError, match="Changed overrides compute_loss, which is never called"):
        Changed(gpt2(), arguments(mw.TrainingArguments, tmp_path))
    with pytest.raises(MeshwrightError, match=r"args is transformers.training_args.TrainingArguments"):
        mw.Trainer(gpt2(), arguments(transformers.TrainingArguments, tmp_path))
    with pytest.raises(MeshwrightError, match="needs a model, or model_init, and not both"):
        mw.Trainer(args=arguments(mw.TrainingArguments, tmp_path))
    with pytest.raises(MeshwrightError, match="no train_dataset"):
        ours(gpt2(), tmp_path, None).train()
    with pytest.raises(MeshwrightError, match="no eval_dataset"):
        ours(gpt2(), tmp_path, text()).evaluate()
    with pytest.raises(MeshwrightError, match="local workers cannot start processes of their own"):
        ours(gpt2(), tmp_path, text(), parallel={"pp": 2}, dataloader_num_workers=1).train()
    with pytest.raises(MeshwrightError, match="257 workers exceed the limit of 256"):
        ours(gpt2(), tmp_path, text(), parallel={"pp": 257, "microbatches": 1}).train()
    with pytest.raises(MeshwrightError, match="the data set has words"):
        ours(gpt2(), tmp_path, [{"words": [1, 2]}] * 8).train()
    for more in ({}, {"compute_loss_func": summed_loss}):
        with pytest.raises(MeshwrightError, match="no loss to train on: from 'input_ids' the model returns 'logits'"):
            ours(gpt2(), tmp_path, [{"input_ids": [1, 2, 3]}] * 8, parallel={"pp": 2}, **more).train()
    with pytest.raises(MeshwrightError, match="all parameters of the model are frozen"):
        ours(gpt2().requires_grad_(False), tmp_path, text(), parallel={"pp": 2}).train()
    ragged = [{"input_ids": [1] * n, "labels": [1] * n} for n in range(2, 10)]
    with pytest.raises(MeshwrightError, match="these rows cannot be stacked"):
        ours(gpt2(), tmp_path, ragged, parallel={"pp": 2}).train()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(MeshwrightError, match="needs pp 2 x dp 2 = 4 ranks, but the job has 3"):
        refuse_world(mw.Parallel(pp=2, dp=2))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parallel": {"pp": 2, "schedule": "pipedream"}}, "a step never ends on all workers at once"),
        ({"parallel": {"pp": 4, "schedule": "chimera", "microbatches": 6}}, "chimera runs whole units of 4"),
        ({"parallel": {"pp": 64, "microbatches": 8}}, "64 stages"),
    ],
    ids=["no flush", "units", "stages"],
)
def test_plans_that_cannot_run_are_refused_before_workers_are_started(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    trainer = ours(gpt2(), tmp_path, text(), **more)
    with pytest.raises(MeshwrightError, match=words):
        trainer.train()
    assert trainer._pool is None


def train_by_hand(folder: str) -> tuple[list[float], list[float], float]:
    """An own loop on this rank: train, keep, train on, go back, train again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*gpt(blocks=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mw.parallelize(model, text_batch(0), {"pp": 2, "dp": 2}, optimizer=optimizer, clip=1.0) as session:
        session.step(text_batch(0))
        kept = session.state_dict()
        first = [session.step(text_batch(i)).loss for i in range(1, 3)]
        session.load_state_dict(kept)
        again = [session.step(text_batch(i)).loss for i in range(1, 3)]
        return first, again, session.evaluate(text_batch(5)).loss


def test_an_own_loop(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(train_by_hand, str(tmp_path), ranks=4)
    assert all(one == found[0] for one in found), "ranks differ"
    first, again, loss = found[0]
    assert first == again and loss > 0
    torch.manual_seed(0)
    model, hook = torch.nn.Sequential(*gpt(blocks=2)), sys.excepthook
    with mw.parallelize(model, text_batch(0), None, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0) as session:
        serial = [session.step(text_batch(i)).loss for i in range(3)]
    assert sys.excepthook is hook, "an error behind it would still be that of a rank"
    assert first == pytest.approx(serial[1:], rel=CLOSE)
    with pytest.raises(MeshwrightError, match="needs 2 ranks, but this is one process"):
        mw.parallelize(model, text_batch(0), {"pp": 2})


def train_on_own_data(folder: str) -> None:
    """As under torchrun, where every rank has read its own."""
    ours(gpt2(), Path(folder), text(8 + 8 * torch.distributed.get_rank()), parallel={"pp": 2}).train()


def test_ranks_that_were_given_different_things_are_told(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="the number of rows of train_dataset is 8 on rank 0 and 16 on rank 1"):
        workers.run(train_on_own_data, str(tmp_path), ranks=2)


@pytest.mark.parametrize("how", [{"bf16": True}, slow({"fp16": True})], ids=str)
def test_short_formats_stay_near_and_are_the_same_under_every_plan(
    how: dict[str, bool], tmp_path: Path, workers: Workers
) -> None:
    logs = []
    for plan, more in ((None, {}), (None, how), ({"pp": 2}, how)):
        trainer = ours(gpt2(), tmp_path, text(), workers, parallel=plan, max_steps=4, gradient_accumulation_steps=2, **more)
        trainer.train()
        logs.append(series(trainer.state.log_history, "loss"))
    assert logs[1] != logs[0] and logs[1] == pytest.approx(logs[0], rel=2e-2)
    assert logs[2] == pytest.approx(logs[1], rel=2e-3)


@pytest.mark.slow
def test_recompute_by_a_budget(tmp_path: Path, workers: Workers) -> None:
    logs = []
    for recompute in (None, 300_000.0, "inline"):
        trainer = ours(gpt2(), tmp_path, text(), workers, parallel={"pp": 2, "recompute": recompute}, max_steps=2)
        trainer.train()
        logs.append(series(trainer.state.log_history, "loss"))
    assert logs[0] == logs[1] == logs[2]
    with pytest.raises(MeshwrightError, match="the budget is 10"):
        ours(gpt2(), tmp_path, text(), parallel={"pp": 2, "recompute": 10.0}, max_steps=2).train()
