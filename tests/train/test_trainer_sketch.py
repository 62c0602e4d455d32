"""The Trainer with a model that has no weights: the same bits as with one that has, and no rank holds more than its stages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import meshwright as mw
from meshwright.capture.weights.sketch import tensors_of
from meshwright.errors import MeshwrightError
from meshwright.runtime.launch.workers import Workers
from meshwright.train.checkpoint.save_pretrained import ONE
from meshwright.train.loop.on_rank import session_for
from meshwright.train.loop.rank_job import RankJob
from tests.conftest import Pool
from tests.support.paths import ROOT, SUPPORT
from tests.support.trainers import Notes, arguments, ours, series, text
from tests.support.trainers import gpt2 as two_seeded

PLAN = {"pp": 2}
SHORT: dict[str, Any] = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
LOGGED = ("loss", "grad_norm", "eval_loss", "train_loss")
PROMPT = torch.tensor([row["input_ids"][:6] for row in text(3)])
gpt2 = partial(two_seeded, seed=7, n_layer=2, attn_pdrop=0.1)
CONFIG = gpt2().config


def logged(trainer: mw.Trainer) -> dict[str, list[float]]:
    return {key: series(trainer.state.log_history, key) for key in LOGGED}


def is_weightless(trainer: mw.Trainer) -> bool:
    return all(p.is_meta for p in trainer.model.parameters())


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(torch.tensor([row["input_ids"] for row in text(4)])).logits
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> mw.Trainer:
    """What a model with its weights comes to, trained once; dropout is on, weights are tied over both stages."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = ours(gpt2(), folder, text(), pool.started(), parallel=PLAN, eval_dataset=text(8), **SHORT)
    trainer.train()
    return trainer


def test_a_sketch_trains_evaluates_generates_and_is_saved_as_the_model_would_be(
    whole: mw.Trainer, tmp_path: Path, workers: Workers
) -> None:
    trainer = ours(mw.sketch(gpt2), tmp_path, text(), workers, parallel=PLAN, eval_dataset=text(8), **SHORT)
    trainer.train()
    assert logged(trainer) == logged(whole) and len(logged(whole)["loss"]) == 4
    assert is_weightless(trainer), "the weights never come to this process"
    assert trainer.evaluate()["eval_loss"] == logged(whole)["eval_loss"][-1]
    trainer.save_model(str(tmp_path / "saved"))
    model = whole.model
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(tmp_path / "saved")), logits(model))
    wanted = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(trainer.generate(PROMPT, max_new_tokens=4), wanted)
    os.utime(tmp_path / "trained" / ONE, ns=(0, 0))
    with pytest.raises(MeshwrightError, match="have changed since this trainer wrote them"):
        trainer.evaluate()


def test_a_sketch_goes_on_from_a_checkpoint_under_another_plan(whole: mw.Trainer, tmp_path: Path, workers: Workers) -> None:
    common: dict[str, Any] = {**SHORT, "eval_dataset": text(8), "save_strategy": "steps", "save_steps": 2}
    first = ours(mw.sketch(gpt2), tmp_path, text(), workers, parallel=PLAN, callbacks=[Notes(2)], **common)
    first.train()
    other = {"pp": 2, "schedule": "chimera"}
    again = ours(mw.sketch(gpt2, weights=tmp_path / "trained"), tmp_path, text(), workers, parallel=other, **common)
    again.train(resume_from_checkpoint=True)
    assert is_weightless(again)
    assert logged(again)["loss"] == pytest.approx(logged(whole)["loss"], rel=1e-6)
    again.save_model()
    assert torch.allclose(logits(GPT2LMHeadModel.from_pretrained(tmp_path)), logits(whole.model), atol=1e-5)


def unseeded() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(CONFIG)


def test_model_init_is_sketched_and_seeded(whole: mw.Trainer, tmp_path: Path, workers: Workers) -> None:
    args = arguments(mw.TrainingArguments, tmp_path, parallel=PLAN, **SHORT)
    trainer = mw.Trainer(model_init=lambda: unseeded(), args=args, train_dataset=text(), eval_dataset=text(8), workers=workers)
    assert is_weightless(trainer)
    trainer.train()
    assert logged(trainer) == logged(whole) and is_weightless(trainer)


def test_one_process_has_all_weights_and_those_of_files(whole: mw.Trainer, tmp_path: Path) -> None:
    trained = cast(GPT2LMHeadModel, whole.model)
    trained.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
    trainer = ours(mw.sketch(gpt2, weights=tmp_path / "weights"), tmp_path, text(), eval_dataset=text(8))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(logged(whole)["eval_loss"][-1], rel=1e-6)
    assert torch.equal(logits(trainer.model), logits(trained)), "this process is the only rank, and has all stages"


# -- what ranks hold


def held_on_rank(job: RankJob) -> tuple[int, int, int]:
    """Bytes of tensors that have values, of those of this rank's stages, and of the model."""
    session = session_for(job)
    every = {id(t): t for _, t in tensors_of(job.model)}.values()
    held = sum(t.untyped_storage().nbytes() for t in every if not t.is_meta)
    stages = [layer for stage in session.engine.stages.values() for layer in stage.layers]
    mine = sum(t.nbytes for t in {id(t): t for _, t in tensors_of(stages)}.values())
    session.close()
    return held, mine, sum(t.nbytes for t in every)


@pytest.mark.parametrize("made", [gpt2, partial(mw.sketch, gpt2)], ids=["model", "sketch"])
def test_a_rank_holds_its_own_stages_and_no_more(made: Callable[[], Any], tmp_path: Path, workers: Workers) -> None:
    trainer = ours(made(), tmp_path, text(), workers, parallel={"pp": 4})
    ranks = trainer.run_on_ranks(held_on_rank, trainer.job(trainer.train_dataset))
    tied = trainer.model.transformer.wte.weight.nbytes
    assert [held for held, _, _ in ranks] == [mine for _, mine, _ in ranks]
    assert sum(held for held, _, _ in ranks) == ranks[0][2] + tied, "the tied table is on the first and on the last"
    if made is not gpt2:
        assert is_weightless(trainer)


# -- odd models


class Weighed(nn.Module):
    """Classes have weights in a buffer, and a part is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unread = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(3, 3)
        self.register_buffer("classes", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """A weighed mean."""
        out = self.last(self.first(x).tanh())
        return {"loss": nn.functional.cross_entropy(out, labels, weight=self.classes), "logits": out}


def classed() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=random), "labels": i % 4} for i in range(24)]


def test_weights_of_classes_and_parts_that_nobody_reads(tmp_path: Path, workers: Workers) -> None:
    torch.manual_seed(3)
    model = Weighed()
    plain = ours(model, tmp_path, classed(), workers, parallel={"pp": 2}, max_steps=3)
    trainer = ours(mw.sketch(Weighed, seed=3), tmp_path, classed(), workers, parallel={"pp": 2}, max_steps=3)
    for one in (plain, trainer):
        one.train()
    assert logged(trainer) == logged(plain)
    trainer.save_model(str(tmp_path / "saved"))
    found, wanted = load_file(tmp_path / "saved" / "model.safetensors"), model.state_dict()
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def test_adapters_alone_are_saved(tmp_path: Path, workers: Workers) -> None:
    trainer = ours(mw.sketch(adapted), tmp_path, text(), workers, parallel=PLAN, max_steps=1, warmup_steps=0)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert not list((tmp_path / "adapter").glob("model*"))
    found, trained = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), load_file(tmp_path / "trained" / ONE)
    wanted = {name.replace(".default", ""): t for name, t in trained.items() if "lora" in name}
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(t.any() for t in found.values()), "trained: the second factor begins with zeros"


# -- torchrun, refusals


@pytest.mark.slow
def test_a_sketch_under_torchrun(whole: mw.Trainer, tmp_path: Path) -> None:
    script = [str(SUPPORT / "torchrun_sketch.py"), str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("("))
    model = cast(GPT2LMHeadModel, whole.model)
    assert first[:3] == second[:3] and first[0] == logged(whole)["loss"] and first[1] == logged(whole)["eval_loss"][-1]
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(tmp_path / "saved")), logits(model))
    tied = model.transformer.wte.weight.numel()
    assert first[3] + second[3] == sum(p.numel() for p in model.parameters()) + tied, "ranks hold their own stages"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"there is no .*nowhere"):
        ours(mw.sketch(gpt2, weights=tmp_path / "nowhere"), tmp_path, text(), parallel={"pp": 2}).train()
    with pytest.raises(MeshwrightError, match="no data set to capture the model with"):
        ours(mw.sketch(gpt2), tmp_path, None, parallel={"pp": 2}).save_model()
    args = arguments(mw.TrainingArguments, tmp_path)
    with pytest.raises(MeshwrightError, match="model_init is called without arguments"):
        mw.Trainer(model_init=lambda trial: trial, args=args)  # type: ignore[misc, arg-type]
    with pytest.raises(MeshwrightError, match="building the model returned NoneType"):
        mw.Trainer(model_init=lambda: None, args=args)
