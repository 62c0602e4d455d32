"""Wrong values and types are refused by name at the border, with a MeshwrightError: exit code 2 and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright import MeshwrightError, TrainingArguments
from meshwright.capture.weights.safetensors_files import Weights
from tests.support.command import app

NAN = float("nan")


def made(tmp_path: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(**{"output_dir": str(tmp_path), "report_to": "none", **more})


PLANS: list[tuple[dict[str, Any], str]] = [
    ({"schedule": 5}, "schedule must be a name, got 5"),
    ({"schedule": "zz"}, "there is no schedule 'zz'"),
    ({"sync": "zz"}, "there is no sync 'zz'"),
    ({"sync": None}, "sync must be a name, got None"),
    ({"transport": "zz"}, "'zz' is not a transport"),
    ({"recompute": "zz"}, "there is no mode 'zz'"),
    ({"recompute": float("inf")}, "recompute must be a mode, a budget in bytes"),
    ({"options": {"zz": 1}}, "onef1b has no option 'zz'"),
    ({"schedule": "chimera", "options": {"pairs": "x"}}, "option pairs cannot be 'x'"),
    ({"schedule": "zero_bubble", "options": {"rest": "nan"}}, "option rest cannot be 'nan'"),
    ({"pp": 10**30}, "pp must be a whole number of at least 1 and below"),
    ({"width": [10**20]}, "width must list the workers of each stage"),
    ({"pp": 2, "width": b"ab"}, "width must list the workers of each stage, got b'ab'"),
    ({"width": ""}, "width must list the workers of each stage"),
    ({"pp": 2, "stages": b"a"}, "stages must list the modules"),
    ({"pp": 2, "recompute": b"\x00\x01"}, "recompute must be a mode"),
    ({"recompute": 10**400}, "recompute must be a mode, a budget in bytes.* got a number that is too large"),
    ({"recompute": -(10**400)}, "recompute must be a mode, a budget in bytes.* got a number that is too large"),
    ({"recompute": [10**400]}, "recompute must be a mode, a budget in bytes"),
    ({"recompute": "9" * 400 + "GB"}, "recompute must be a mode, a budget in bytes"),
    ({"stages": [10**400]}, "stages must list the modules"),
]

VAST: list[tuple[dict[str, Any], str]] = [  # Python writes no number of so many digits
    ({"pp": 10**5000}, "pp must be .* got a number that is too large"),
    ({"schedule": 10**5000}, "schedule must be a name, got a number that is too large"),
    ({"width": [10**5000]}, "width must list the workers of each stage, got a list that is too large"),
    ({"recompute": [10**5000]}, "recompute must be a mode, .* got a list that is too large"),
    ({"options": {"chunks": 10**5000}}, "option chunks must be below"),
    ({"schedule": "chimera", "options": {"pairs": [10**5000]}}, "of options has a whole number that is too large"),
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


@pytest.mark.parametrize(("plan", "words"), VAST, ids=range(len(VAST)))
def test_numbers_that_python_does_not_write_are_refused(plan: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=words):
        made(tmp_path, parallel=plan)


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("form", ["plan.json", "plan.toml", "job.toml", "model.toml"])
def test_numbers_of_many_digits_in_files_are_refused(form: str, digits: int, tmp_path: Path) -> None:
    path, number = tmp_path / form, "9" * digits
    table = f"schema = 1\n[parallel]\nrecompute = {number}\n" if "plan" in form else f"rows = {number}\n"
    path.write_text(f'{{"schema": 1, "parallel": {{"recompute": {number}}}}}' if path.suffix == ".json" else table)
    if "plan" in form:
        with pytest.raises(MeshwrightError):
            made(tmp_path, parallel=str(path))
    else:
        found = CliRunner().invoke(app, ["train" if "job" in form else "inspect", str(path)])
        assert isinstance(found.exception, MeshwrightError), found.exception


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
        ({"output_dir": 5}, "output_dir must be a string or None, got int 5"),
        ({"per_device_train_batch_size": 99999999999}, "at least 1 and below 1000000000, got 99999999999"),
        ({"label_names": 5}, "label_names must be a list of strings or None, got int 5"),
        ({"label_names": [5]}, "label_names must be a list of strings"),
        ({"label_names": "labels"}, "label_names must be a list of strings"),
        ({"optim_args": 5}, "optim_args must be a string or None, got int 5"),
        ({"report_to": 5}, "report_to must be None or a string or a list of strings"),
        ({"bf16": "x"}, "bf16 must be True or False, got str 'x'"),
        ({"gradient_checkpointing": 5}, "gradient_checkpointing must be True or False"),
        ({"gradient_checkpointing_kwargs": 5}, "gradient_checkpointing_kwargs must be a mapping"),
        ({"lr_scheduler_kwargs": [1]}, "lr_scheduler_kwargs must be a mapping or a string or None"),
        ({"include_for_metrics": 5}, "include_for_metrics must be a list of strings"),
        ({"run_name": [1]}, "run_name must be a string or None"),
        ({"label_names": date(2020, 1, 1)}, "label_names must be a list of strings"),
        ({"accelerator_config": "x"}, "these training arguments cannot be used: .*No such file"),
        ({"accelerator_config": {"zz": 1}}, "these training arguments cannot be used: "),
        ({"deepspeed": "x.json"}, "deepspeed='x.json' is not supported"),
        ({"fsdp": ["full_shard"]}, "fsdp=.*is not supported"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_numbers_that_no_training_could_use(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=words):
        made(tmp_path, **more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "gpt2"}, "model is the string 'gpt2', not a model"),
        ({"model": nn.Linear}, "model is the class Linear"),
        ({"model": 5}, "model is int 5"),
        ({"model": []}, "has no layers"),
        ({"model": [nn.Linear(2, 2), "relu"]}, "has str 'relu' among its layers"),
        ({"model": None, "model_init": 5}, "model_init is int 5, which cannot be called"),
        ({"train_dataset": 5}, "train_dataset is int 5, which can neither be indexed"),
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
        (lambda: trainer.train(""), "resume_from_checkpoint is an empty string"),
        (lambda: trainer.evaluate(5), "eval_dataset is int 5"),
        (lambda: trainer.predict(None), "no test_dataset"),
        (lambda: trainer.add_callback(5), "a callback is int 5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(MeshwrightError, match=words):
            call()


ROWS = [(torch.zeros(2), torch.zeros(2))] * 8


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lr_scheduler_kwargs": "[1]"}, r"lr_scheduler_type=.* with lr_scheduler_kwargs='\[1\]' cannot be used: .*mapping"),
        ({"lr_scheduler_kwargs": {"a": 1}}, "cannot be used: .*unexpected keyword argument 'a'"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}, "cannot be used: lr_end"),
        ({"optim_args": "foo"}, "with optim_args='foo' cannot be used"),
        ({"optim": "galore_adamw"}, "optim=.* cannot be used"),
        ({"report_to": "zz"}, r"report_to=\['zz'\] cannot be used: zz is not supported"),
        ({"output_dir": "/dev/null/x"}, "output_dir '/dev/null/x' cannot be written to: Not a directory"),
        ({"output_dir": "x" * 5000}, "output_dir 'xxx.*' cannot be written to: File name too long"),
        ({"output_dir": "a\0b"}, "cannot be written to: .*null byte"),
    ],
    ids=lambda x: str(x)[:80] if isinstance(x, dict) else None,
)
def test_what_arguments_ask_for_is_made_once_before_the_model_is_looked_at(
    more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, *_: object) -> Any:
            raise AssertionError("the arguments come first")

    with pytest.raises(MeshwrightError, match=words):
        mw.Trainer(Never(), made(tmp_path, **more), train_dataset=ROWS).train()


def test_arguments_as_scripts_write_them_still_pass(tmp_path: Path) -> None:
    """What Hugging Face takes and its fields do not declare to the letter; and arguments that are made from others."""
    found = made(
        tmp_path, output_dir=tmp_path, label_names=("labels",), bf16=0, learning_rate=1, save_steps=10, eval_steps=None,
        lr_scheduler_type="cosine", eval_strategy="no", report_to=["none"], max_grad_norm=None, fsdp="",
        accelerator_config={"split_batches": False}, lr_scheduler_kwargs='{"num_cycles": 1}', debug="", disable_tqdm=True,
    )  # fmt: skip
    again = replace(found, seed=7)
    assert again.lr_scheduler_kwargs == {"num_cycles": 1} and again.accelerator_config == found.accelerator_config


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "gpt-tiny", "--resume-from-checkpoint", "x" * 5000], "does not exist"),
        (["train", "x" * 5000 + ".toml"], "cannot read the model"),
        (["train", "gpt-tiny", "--parallel", "x" * 5000], "cannot read the plan"),
        (["train", "gpt-tiny", "--parallel", "a\0b"], "cannot read the plan"),
        (["train", "gpt-tiny", "--save-model", "/dev/null/x"], "--save-model '/dev/null/x' cannot be written to"),
        (["inspect", "x" * 5000 + ".json"], "cannot read the configuration"),
        (["inspect", "a\0b.toml"], "cannot read the model"),
        (["show", "x" * 5000], "there is no schedule"),
        (["check", "x" * 5000 + ".json"], "cannot read"),
    ],
    ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else None,
)
def test_names_that_no_file_can_have(command: list[str], words: str) -> None:
    found = CliRunner().invoke(app, command)
    assert isinstance(found.exception, MeshwrightError) and words in str(found.exception), found.exception


def test_a_model_is_not_saved_where_nothing_can_be(tmp_path: Path) -> None:
    trainer = mw.Trainer(nn.Sequential(nn.Linear(2, 2)), made(tmp_path))
    with pytest.raises(MeshwrightError, match="cannot be written to"):
        trainer.save_model("/dev/null/x")
    with pytest.raises(MeshwrightError, match="there is no xxx"):
        Weights.at("x" * 5000)


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


JOB = 'schema = 1\nmodel = "gpt-tiny"\n[arguments]\nmax_steps = 1\nparallel = {pp = 2}\n'


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["gpt-tiny", "--length", "0"], "a row must have at least 1 token"),
        (["gpt-tiny", "--microbatches", "0"], "a step has at least 1 microbatch"),
        (["job.toml"], "the plan of a job belongs in its table"),
    ],
)
def test_zero_is_no_default_and_a_plan_is_no_argument(
    flags: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    found = CliRunner().invoke(app, ["train", *flags])
    assert isinstance(found.exception, MeshwrightError) and why in str(found.exception)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": 5}, "a model must be a module, a list of layers or a sketch, got 5"),
        ({"model": [5]}, "a model must be a module, a list of layers or a sketch"),
        ({"model": []}, "a model must be a module, a list of layers or a sketch"),
        ({"optimizer": 5}, "optimizer must be a torch.optim.Optimizer or a function that returns one, got 5"),
        ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer or a function that returns one, got 'adam'"),
        ({"scheduler": 5}, "scheduler must be a learning-rate schedule or a function that returns one, got 5"),
        ({"loss": 5}, "loss must be a function of output and target, got 5"),
        ({"seed": "x"}, "a seed must be a whole number of at least 0 and below 2"),
    ],
    ids=str,
)
def test_what_parallelize_cannot_use_is_named(given: dict[str, Any], text: str) -> None:
    batch = (torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(MeshwrightError, match=text):
        mw.parallelize(**{"model": [torch.nn.Linear(3, 3)], "example_batch": batch, **given})


@pytest.mark.parametrize("captured", [True, False])
def test_a_step_takes_batches_alone(captured: bool) -> None:
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    batch = (torch.zeros(4, 3), torch.zeros(4, 3))
    with mw.parallelize(torch.nn.Sequential(*layers) if captured else layers, batch) as session:
        for wrong in (None, 5, "text", object()):
            with pytest.raises(MeshwrightError, match="a batch must be a tuple or a mapping of tensors"):
                session.step(wrong)  # type: ignore[arg-type]
