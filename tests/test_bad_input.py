"""Wrong values and types are refused by name at the border, with a MeshwrightError: exit code 2 and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright import MeshwrightError, TrainingArguments
from meshwright.cli.main import app

NAN = float("nan")


def made(tmp_path: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(**{"output_dir": str(tmp_path), "report_to": "none", **more})


PLANS: list[tuple[dict[str, Any], str]] = [
    ({"schedule": 5}, "schedule is a name, got 5"),
    ({"schedule": "zz"}, "there is no schedule 'zz'"),
    ({"sync": "zz"}, "there is no sync 'zz'"),
    ({"sync": None}, "sync is a name, got None"),
    ({"transport": "zz"}, "'zz' is not a transport"),
    ({"recompute": "zz"}, "there is no mode 'zz'"),
    ({"recompute": float("inf")}, "recompute is a mode, a budget in bytes"),
    ({"options": {"zz": 1}}, "onef1b has no option 'zz'"),
    ({"schedule": "chimera", "options": {"pairs": "x"}}, "option pairs cannot be 'x'"),
    ({"schedule": "zero_bubble", "options": {"rest": "nan"}}, "option rest cannot be 'nan'"),
    ({"pp": 10**30}, "pp must be a whole number of at least 1 and below"),
    ({"width": [10**20]}, "width names workers per stage"),
]


@pytest.mark.parametrize(("plan", "words"), PLANS, ids=lambda x: str(x) if isinstance(x, dict) else None)
def test_a_plan_that_cannot_be_is_refused_when_it_is_made(plan: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The same words in every entry, before a model or a batch is looked at."""

    def never(*_: object) -> Any:
        raise AssertionError("the plan comes first")

    with pytest.raises(MeshwrightError, match=words):
        made(tmp_path, parallel=plan)
    with pytest.raises(MeshwrightError, match=words):
        mw.parallelize(nn.Sequential(nn.Linear(2, 2)), (torch.zeros(2, 2), torch.zeros(2, 2)), plan)
    with pytest.raises(MeshwrightError, match=words):
        mw.verify(never, never, plan)


@pytest.mark.parametrize(
    "flags", [("--schedule", "zz"), ("--parallel", '{"sync": "zz"}'), ("--parallel", '{"options": {"zz": 1}}')]
)
def test_flags_of_a_plan_are_refused_before_anything_is_loaded(flags: tuple[str, ...]) -> None:
    found = CliRunner().invoke(app, ["train", "gpt-tiny", *flags])
    assert isinstance(found.exception, MeshwrightError) and "zz" in str(found.exception)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"learning_rate": NAN}, "learning_rate must be a number of at least 0, got nan"),
        ({"learning_rate": -1}, "learning_rate must be a number of at least 0, got -1"),
        ({"learning_rate": "fast"}, "learning_rate must be a number"),
        ({"seed": -1}, "seed must be a whole number from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "seed must be a whole number"),
        ({"seed": None}, "seed must be a whole number"),
        ({"data_seed": 0.5}, "data_seed must be a whole number"),
        ({"weight_decay": NAN}, "weight_decay must be a number"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be a number of at least 0 and below 1"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be a number"),
        ({"num_train_epochs": NAN}, "num_train_epochs must be a number"),
        ({"max_steps": 2.5}, "max_steps must be a whole number"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size must be a whole number"),
        ({"lr_scheduler_type": "zz"}, "these training arguments cannot be used"),
        ({"output_dir": 5}, "these training arguments cannot be used"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_numbers_that_no_training_could_use(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=words):
        made(tmp_path, **more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "gpt2"}, "model is the text 'gpt2', not a model"),
        ({"model": nn.Linear}, "model is the class Linear"),
        ({"model": 5}, "model is int 5"),
        ({"model": []}, "has no layers"),
        ({"model": [nn.Linear(2, 2), "relu"]}, "has str 'relu' among its layers"),
        ({"model": None, "model_init": 5}, "model_init is int 5, which cannot be called"),
        ({"train_dataset": 5}, "train_dataset is int 5: neither rows by number"),
        ({"train_dataset": "stdlib"}, "train_dataset is str 'stdlib'"),
        ({"eval_dataset": {"a": 5}}, r"eval_dataset\['a'\] is int 5"),
        ({"eval_dataset": {}}, "eval_dataset is an empty mapping"),
        ({"data_collator": 5}, "data_collator is int 5, which cannot be called"),
        ({"compute_metrics": 5}, "compute_metrics is int 5"),
        ({"callbacks": [5]}, "a callback is int 5"),
        ({"callbacks": 5}, "callbacks is int 5"),
        ({"optimizers": torch.optim.SGD}, "optimizers is SGD"),
        ({"optimizers": (5, None)}, "as its optimizer"),
        ({"optimizer_cls_and_kwargs": torch.optim.SGD}, "optimizer_cls_and_kwargs is SGD"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_what_a_trainer_is_not_made_of(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=words):
        mw.Trainer(**{"model": nn.Sequential(nn.Linear(2, 2)), "args": made(tmp_path), **more})


def test_what_is_given_later_is_looked_at_too(tmp_path: Path) -> None:
    trainer = mw.Trainer(nn.Sequential(nn.Linear(2, 2)), made(tmp_path), train_dataset=[(torch.zeros(2), torch.zeros(2))] * 8)
    for call, words in (
        (lambda: trainer.train(5), "resume_from_checkpoint is int 5"),  # type: ignore[arg-type]
        (lambda: trainer.train(""), "resume_from_checkpoint is an empty text"),
        (lambda: trainer.evaluate(5), "eval_dataset is int 5"),
        (lambda: trainer.predict(None), "no test_dataset"),
        (lambda: trainer.add_callback(5), "a callback is int 5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(MeshwrightError, match=words):
            call()


CONFIG: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}


@pytest.mark.parametrize(
    "more",
    [
        {"n_layer": "two"}, {"n_embd": "wide"}, {"n_embd": None}, {"n_head": 0}, {"n_head": 3}, {"vocab_size": -4},
        {"n_positions": "x"},
        {"architectures": "GPT2LMHeadModel"}, {"architectures": [5]}, {"model_type": 5}, {"activation_function": "zz"},
        {"attn_pdrop": "x"}, {"n_layer": [2]},
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_with_wrong_types(more: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **more}))
    found = CliRunner().invoke(app, ["inspect", str(path)])
    assert isinstance(found.exception, MeshwrightError), found.exception


@pytest.mark.parametrize(
    "flags",
    [("--rows", "99999999999"), ("--rows", "0"), ("--length", "0"), ("--stages", "99999999999"), ("--stages", "0")],
    ids=" ".join,
)
def test_sizes_that_no_example_has(flags: tuple[str, ...]) -> None:
    found = CliRunner().invoke(app, ["inspect", "gpt-tiny", *flags])
    assert isinstance(found.exception, MeshwrightError), found.exception


def test_the_command_exits_with_two_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "train", "gpt-tiny", "--learning-rate", "nan", "--seed", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr, done.stderr
