"""What a user finds after a run: evaluations logged once, and checkpoints that transformers can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from meshwright.runtime.launch.workers import Workers
from meshwright.train.checkpoint import folders as rotate
from tests.support.trainers import Plain, distance, gpt2, ours, text, vectors


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of one curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


@pytest.mark.parametrize("plan", [None, {"pp": 2}], ids=str)
def test_an_evaluation_is_logged_once_and_beside_the_training(
    plan: Any, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = ours(gpt2(), tmp_path / "out", text(), workers, parallel=plan, max_steps=2, report_to=["tensorboard"])
    trainer.train()
    metrics = trainer.evaluate(text(8))
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == [metrics["eval_loss"]]
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 1
    [folder] = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    assert folder.is_relative_to(tmp_path / "out")
    assert [step for step, _ in scalars(folder, "train/loss")] == [1, 2]
    assert scalars(folder, "eval/loss") == [(2, pytest.approx(metrics["eval_loss"]))]


class Headed(GPT2LMHeadModel):
    """Has a head that its forward never reads, and a buffer of one number."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.unread = nn.Linear(4, 4)
        self.register_buffer("number", torch.tensor(3.0))
        self.post_init()


@pytest.mark.parametrize("plan", [None, {"pp": 2, "schedule": "chimera"}, {"pp": 2, "dp": 2}], ids=str)
def test_a_checkpoint_is_read_by_from_pretrained(plan: Any, tmp_path: Path, workers: Workers) -> None:
    more: dict[str, Any] = {"parallel": plan, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = ours(Headed(gpt2().config), tmp_path, text(), workers, **more)
    trainer.train()
    found, about = Headed.from_pretrained(tmp_path / "checkpoint-2", output_loading_info=True)
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), about
    assert distance(found, trainer.model) == 0
    assert found.number.shape == () and found.number == trainer.model.number
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2").config.n_layer == 4


@pytest.mark.parametrize("plan", [None, {"pp": 2}], ids=str)
def test_a_checkpoint_of_a_peft_model_has_its_adapters(plan: Any, tmp_path: Path, workers: Workers) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def made() -> Any:
        torch.manual_seed(0)
        return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))

    more: dict[str, Any] = {"parallel": plan, "save_strategy": "steps", "save_steps": 2}
    trainer = ours(made(), tmp_path, text(), workers, **more, max_steps=2)
    trainer.train()
    found = PeftModel.from_pretrained(gpt2(), tmp_path / "checkpoint-2")
    assert distance(found, trainer.module) == 0
    again = ours(made(), tmp_path, text(), workers, **more, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_a_checkpoint_of_a_plain_model_has_its_weights_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = ours(Plain(), tmp_path, vectors(), save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    weights = load_file(next((tmp_path / "checkpoint-2").glob("model*.safetensors")))
    assert {name: t.tolist() for name, t in weights.items()} == {
        name: t.tolist() for name, t in trainer.module.state_dict().items()
    }


def test_a_checkpoint_of_the_first_schema_is_still_resumed(tmp_path: Path) -> None:
    """There, weights are in one file with the optimizer's state, under `model/NAME` and `buffer/NAME`."""
    from safetensors.torch import load_file, save_file

    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = ours(gpt2(), tmp_path, text(), max_steps=4, **more)
    whole.train()
    folder = tmp_path / "checkpoint-2"
    [weights] = folder.glob("model*.safetensors")
    [rest] = folder.glob("optimizer-*.safetensors")
    names = {f"model/{name}" if name in dict(whole.module.named_parameters()) else f"buffer/{name}": t
             for name, t in load_file(weights).items()}  # fmt: skip
    save_file({**load_file(rest), **names}, folder / "shard-00001-model-00001-of-00001.safetensors")
    for name in (weights.name, rest.name, rotate.MARKER, "model.safetensors.index.json", "config.json", "generation_config.json"):
        (folder / name).unlink()
    facts = json.loads((folder / rotate.FACTS).read_text())
    facts.pop("unread", None)
    rotate.write(folder / rotate.FACTS, {**facts, "schema": 1})
    files = {path.name: rotate.describe(path) for path in folder.iterdir()}
    rotate.write(folder / rotate.MARKER, {"schema": 1, "step": 2, "files": files})
    model = gpt2(seed=1)
    ours(model, tmp_path, text(), max_steps=4, **more).train(resume_from_checkpoint=str(folder))
    assert distance(model, whole.model) < 1e-6
