"""MODEL means the same for every verb: presets, small models, TOML, config.json and functions, by one resolver."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from meshwright import MeshwrightError
from meshwright.train.models.example_batches import batches_for, example_for
from meshwright.train.models.model_names import presets, resolve_model
from meshwright.train.verify import verify as module
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.support.command import app

TOML = """schema = 1
head = "AutoModelForCausalLM"
[config]
model_type = "gpt2"
vocab_size = 31
n_positions = 8
n_embd = 8
n_layer = 3
n_head = 2
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 23,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
}
OWN = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.first(x).tanh())

def build():
    return Wide()

def batch(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.flip(1)
"""


class Captured(Exception):
    """Carries what would have been verified."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file for every form of MODEL."""
    (tmp_path / "mine.toml").write_text(TOML)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "own_names.py").write_text(OWN)
    (tmp_path / "layers.json").write_text('{"schema": 1, "kind": "model", "layers": []}')
    (tmp_path / "job.toml").write_text('schema = 1\nmodel = "gpt-tiny"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the verb up to its workers; gives the case, the layers and the prepared run that they would be sent."""

    def stop(case: Case) -> Any:
        raise Captured(*prepare_case(case))

    monkeypatch.setattr(module, "prepare_case", stop)

    def run(*arguments: str) -> Any:
        found = CliRunner().invoke(app, ["verify", *arguments]).exception
        assert isinstance(found, Captured), found
        return found.args

    return run


@pytest.mark.parametrize(
    ("arguments", "kind", "captured"),
    [
        (("mlp",), list, False),
        (("gpt",), list, False),
        (("gpt-tiny", "--length", "8"), "GPT2LMHeadModel", True),
        (("vit-small",), "ViTForImageClassification", True),
        (("mine.toml",), "GPT2LMHeadModel", True),
        (("config.json",), "LlamaForCausalLM", True),
        (("own_names:build", "--batch-function", "own_names:batch"), "Wide", True),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_verify_takes_every_form(folder: Path, verified: Any, arguments: Any, kind: Any, captured: bool) -> None:
    case, layers, run = verified(*arguments, "--microbatches", "2")
    built = case.build()
    assert (type(built) if kind is list else type(built).__name__) == kind
    assert (case.flat is not None) == captured and run.schedule.stages == 2 and len(layers.modules) >= 2
    sent = pickle.loads(pickle.dumps((case.build, case.batch)))
    again = sent[1](1)
    first = again if isinstance(again, tuple) else tuple(again.values())
    given = case.batch(1)
    assert all(map(torch.equal, first, given if isinstance(given, tuple) else given.values()))


def test_a_small_model_is_as_deep_as_the_plan(folder: Path, verified: Any) -> None:
    _, layers, run = verified("gpt", "--schedule", "interleaved", "--pp", "4", "--option", "chunks=3", "-n", "4")
    assert run.schedule.stages == 12 and len(layers.modules) == 12


def test_random_batches_fit_the_model(folder: Path) -> None:
    batches = batches_for(resolve_model("mine.toml"), None, rows=6)
    first, second = batches(0), batches(1)
    assert first["input_ids"].shape == (6, 8) and first["input_ids"].max() < 31
    assert not torch.equal(first["input_ids"], second["input_ids"]) and first["attention_mask"].min() == 1
    pictures = batches_for(resolve_model("vit-small"), None, rows=3)(0)
    assert pictures["pixel_values"].shape == (3, 1, 8, 8) and pictures["labels"].shape == (3,)
    assert pictures["pixel_values"].is_floating_point() and pictures["labels"].max() < 10


def test_a_batch_function_serves_models_by_name_too(folder: Path) -> None:
    found = batches_for(resolve_model("config.json"), "own_names:batch", rows=4)
    assert found(0)[0].shape == (8, 4)


def test_a_model_without_a_vocabulary_gets_the_id_that_always_exists() -> None:
    class Config:
        num_labels = 3

        def get_text_config(self) -> Config:
            return self

    class Speaking(nn.Module):
        main_input_name, config = "input_ids", Config()

    drawn = example_for("own", Speaking(), rows=2, length=5)(0)
    assert drawn["input_ids"].eq(0).all() and drawn["labels"].eq(0).all()


@pytest.mark.parametrize("verb", ["verify", "inspect", "train", "measure"])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gpt-tinny", r"there is no model 'gpt-tinny'; did you mean gpt-tiny\?"),
        ("gtp", r"there is no model 'gtp'; did you mean gpt\?"),
        ("layers.json", "layers.json has the layers of a model, not the model"),
        ("missing.toml", "missing.toml"),
        ("missing.json", "missing.json"),
        ("own_names:nothing", "cannot import own_names:nothing"),
    ],
)
def test_every_verb_refuses_alike(folder: Path, verb: str, model: str, text: str) -> None:
    if verb == "inspect" and model == "layers.json":
        pytest.skip("inspect reads layers")
    more = ["--batch-function", "own_names:batch"] if ":" in model and verb in ("verify", "inspect") else []
    more = ["--max-steps", "1"] if verb in ("train", "measure") else more
    found = CliRunner().invoke(app, [verb, model, *more]).exception
    assert isinstance(found, MeshwrightError) and re.search(text, str(found)), found


def test_the_names_that_exist_are_listed() -> None:
    with pytest.raises(MeshwrightError) as found:
        resolve_model("nothing-like-it")
    assert found.value.fix == f"mlp, gpt, {', '.join(presets())}, a TOML, a config.json, or package.module:function"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("job.toml",), "job.toml is a training job, not a model"),
        (("own_names:build",), "own_names:build needs data"),
        (("mlp", "--length", "4"), "mlp has its own data, --length"),
        (("gpt-tiny", "--length", "65"), "gpt-tiny takes 64 tokens per row, not 65"),
        (("gpt-tiny", "--length", "0"), "at least 1 token"),
        (("vit-small", "--length", "4"), "takes pictures"),
        (("own_names:build", "--batch-function", "own_names:batch", "--length", "4"), "decides the number of tokens"),
    ],
)
def test_verify_refuses(folder: Path, arguments: Any, text: str) -> None:
    found = CliRunner().invoke(app, ["verify", *arguments]).exception
    assert isinstance(found, MeshwrightError) and text in str(found), found
    assert not (folder / "certificate.json").exists()


def test_a_small_model_trains_by_name(folder: Path) -> None:
    from meshwright.train.job_file import Job

    trainer = Job(model="mlp", arguments={"max_steps": 2, "report_to": "none", "disable_tqdm": True}).trainer()
    assert len(trainer.train_dataset) == 512 and trainer.train().global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("mine.toml", "--schedule", "chimera"),
        ("config.json", "--dp", "2"),
        ("vit-small", "--schedule", "zero_bubble"),
        ("own_names:build", "--batch-function", "own_names:batch"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_captured_models_equal_one_process(folder: Path, arguments: tuple[str, ...]) -> None:
    found = CliRunner().invoke(app, ["verify", *arguments, "-n", "2", "--steps", "2", "--json"])
    assert found.exit_code == 0, found.output
    certificate = json.loads(found.stdout)
    assert certificate["passed"] and certificate["max_relative_error"] <= 1e-9 and certificate["compared"] > 0
