"""Small models and data for trainers, and what of two logs is compared."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, TrainerCallback

import meshwright as mw

LENGTH = 16
OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2(seed: int = 0, **more: Any) -> GPT2LMHeadModel:
    transformers.set_seed(seed)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 16, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **OFF, **more}, bos_token_id=0, eos_token_id=0))


def llama(seed: int = 0) -> LlamaForCausalLM:
    transformers.set_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0)
    )


def text(rows: int = 44, *, uneven: bool = True) -> list[dict[str, list[int]]]:
    """Bytes of a source file; the first labels of most rows do not count, more or less of them."""
    data = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    found = []
    for i in range(rows):
        tokens = list(data[i * LENGTH : (i + 1) * LENGTH])
        ignored = (5 * i) % 13 if uneven else 0
        found.append({"input_ids": tokens, "labels": [-100] * ignored + tokens[ignored:]})
    return found


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }
    if kind is transformers.TrainingArguments:
        given["use_cpu"] = True
    return kind(**{**given, **more})


def series(history: list[dict[str, float]], key: str) -> list[float]:
    return [entry[key] for entry in history if key in entry]


def reference(model: nn.Module, folder: Path, data: Any, **more: Any) -> list[dict[str, float]]:
    """What the Hugging Face Trainer logs; the model is trained."""
    own = {key: more.pop(key) for key in ("eval_dataset", "compute_loss_func", "compute_metrics", "data_collator") if key in more}
    trainer = transformers.Trainer(model, arguments(transformers.TrainingArguments, folder, **more), train_dataset=data, **own)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history


def ours(model: Any, folder: Path, data: Any, workers: Any = None, **more: Any) -> mw.Trainer:
    names = (
        "eval_dataset",
        "compute_loss_func",
        "compute_metrics",
        "data_collator",
        "callbacks",
        "optimizers",
        "processing_class",
    )
    own = {key: more.pop(key) for key in names if key in more}
    return mw.Trainer(model, arguments(mw.TrainingArguments, folder, **more), train_dataset=data, workers=workers, **own)


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


class Notes(TrainerCallback):
    """Writes down what it is told, and may stop."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[str] = []
        self.stop_at = stop_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"step {state.global_step}")
        if self.stop_at == state.global_step and state.is_world_process_zero:  # one rank decides for all
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.events.append("log")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.events.append(f"evaluate {sorted(metrics)[0]}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"save {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("end")


def accuracy(prediction: Any) -> dict[str, float]:
    """Of next tokens."""
    guessed, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    counts = labels != -100
    return {"accuracy": float((guessed == labels)[counts].mean()), "rows": len(labels)}


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """An own loss as Hugging Face describes it: a sum over the batch's items, divided by their number in the whole step."""
    logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
    total = nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


class Plain(nn.Module):
    """A model without a configuration, with a skip over its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean squares, by name."""
        hidden = self.first(x).tanh()
        out = self.last(self.middle(hidden).tanh() + hidden)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def no_numbers() -> list[dict[str, Tensor]]:
    """Rows that end training: the second batch of eight is not finite."""
    return [{**row, "x": row["x"] * (1.0 if i < 8 else float("nan"))} for i, row in enumerate(vectors())]


def vectors(rows: int = 24) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=random)
    return [{"x": row, "labels": row.roll(1)} for row in x]


def trains_as_hugging_face(folder: Path, workers: Any, plan: dict[str, Any]) -> None:
    """Loss, norm, evaluation of rows that divide by nothing, weights, generation, a folder for from_pretrained, a second train().

    A step has 8 rows, whatever the data-parallel copies.
    """
    rows = 8 // plan.get("dp", 1)
    more: dict[str, Any] = {"eval_dataset": text(11), "eval_strategy": "epoch", "num_train_epochs": 1}
    theirs, model = gpt2(n_head=4), gpt2(n_head=4)
    wanted = reference(theirs, folder / "hf", text(24), **more)
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    trainer = ours(model, folder / "ours", text(24), workers, parallel=plan, **sizes, **more)
    trainer.train()
    for key in ("loss", "eval_loss", "grad_norm"):
        assert series(trainer.state.log_history, key) == pytest.approx(series(wanted, key), rel=1e-5), key
    assert distance(model, theirs) < 1e-5
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10], [1, 2, 3]])
    assert torch.equal(trainer.generate(prompt, max_new_tokens=4), theirs.generate(prompt, max_new_tokens=4, do_sample=False))
    trainer.save_model(str(folder / "model"))
    assert distance(GPT2LMHeadModel.from_pretrained(folder / "model"), model) == 0.0
    trainer.train()
    assert trainer.optimizer_state is not None
    shapes = {name: tuple(of["exp_avg"].shape) for name, of in trainer.optimizer_state.tensors.items()}
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}, "optimizer states come back whole"
