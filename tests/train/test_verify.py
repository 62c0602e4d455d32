"""`verify` as users meet it: what it refuses before workers start, its certificate, and the verb."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright import Certificate, MeshwrightError, verify
from meshwright.train.models import small_models as models
from meshwright.train.verify import verify as module
from tests.conftest import Pool
from tests.support import command as runner

BUILD, DATA = partial(models.mlp, layers=6), partial(models.mlp_batch, rows=8)


def frozen() -> list[nn.Module]:
    """Nothing learns."""
    return [layer.requires_grad_(False) for layer in models.mlp(layers=4)]


def words() -> str:
    """No model."""
    return "model"


def uneven(step: int) -> tuple[Tensor, Tensor]:
    """A batch whose tensors do not fit."""
    return torch.zeros(4, 16), torch.zeros(5, 16)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"schedule": "nope"}, {}, "there is no schedule 'nope'"),
    ({"options": {"chunks": 2}}, {}, "onef1b has no option 'chunks'"),
    ({"pp": 8, "microbatches": 2}, {}, "6 layers cannot be cut into 8 stages"),
    ({"pp": 4, "microbatches": 6, "schedule": "chimera"}, {}, "chimera runs whole units of 4"),
    ({"pp": 3, "schedule": "chimera"}, {}, "chimera needs an even number"),
    ({"pp": 4, "microbatches": 2, "schedule": "cyclic"}, {}, "one microbatch per worker"),
    ({"microbatches": 9}, {}, "a batch of 8 rows cannot be cut into 9 microbatches"),
    ({"microbatches": 5, "dp": 2}, {}, "cut into 5 microbatches on each of 2 data-parallel copies"),
    ({"schedule": "chimera", "width": (2, 1)}, {}, "chimera cannot be widened"),
    ({"width": (2, 1, 1)}, {}, "width has 3 stages, pp is 2"),
    ({"width": (2, 0)}, {}, "width must list the workers of each stage"),
    ({"pp": 0}, {}, "pp must be a whole number"),
    ({"cp": 2}, {}, "parallel has no 'cp'"),
    ({"sync": "soon"}, {}, "there is no sync 'soon'"),
    ({"recompute": "often"}, {}, "there is no mode 'often'"),
    ({"recompute": (1.0,)}, {}, "2 stages, but recompute has 1"),
    ({"pp": 6, "recompute": (0.5,) * 6}, {}, "a share 0.5 of it cannot be recomputed"),
    ({"schedule": "shifted", "recompute": "inline"}, {}, "sets its recompute itself"),
    ({"transport": "pigeon"}, {}, "'pigeon' is not a transport"),
    ({}, {"dtype": "int8"}, "there is no tolerance for 'int8'"),
    ({}, {"steps": 0}, "steps must be a whole number"),
    ({}, {"build": lambda: models.mlp()}, "build cannot be sent to workers"),
    ({}, {"batch": lambda step: None}, "batch cannot be sent to workers"),
    ({}, {"build": words}, r"build\(\) returned str"),
    ({}, {"build": partial(nn.Linear, 16, 16)}, "Linear has 1 layer and cannot be cut into 2 stages"),
    (
        {},
        {"build": partial(nn.Linear, 2, 2)},
        "the model itself fails on this batch, before any capture: RuntimeError: mat1 and mat2",
    ),
    ({}, {"build": frozen}, "no parameter of the model requires a gradient"),
    ({}, {"batch": uneven}, "different numbers of rows"),
    ({}, {"batch": partial(int)}, r"batch\(step\) returned int"),
]


@pytest.mark.parametrize(("plan", "more", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_bad_input_is_refused_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], more: dict[str, Any], text: str
) -> None:
    def started(count: int) -> None:
        pytest.fail("workers were started")

    monkeypatch.setattr(module, "Workers", started)
    with pytest.raises(MeshwrightError, match=text):
        verify(**{"build": BUILD, "batch": DATA, "parallel": {"pp": 2, **plan}, **more})


def test_what_a_certificate_says(pool: Pool) -> None:
    found = pool.verify(BUILD, DATA, pp=2, dp=2, microbatches=2, steps=2, seed=3)
    assert isinstance(found, Certificate) and isinstance(found, meshwright.Certificate)
    assert found.passed and found.max_relative_error <= 1e-9 and found.loss_error <= 1e-9 and found.replicas_equal
    written = json.loads(found.to_json())
    assert (written["kind"], written["schema"], written["seed"]) == ("certificate", 1, 3)
    assert set(written["versions"]) == {"meshwright", "torch", "python"}
    assert written["losses"] == list(found.losses) and len(found.losses) == found.steps == found.updates == 2
    assert found.compared == 2 * 2 * 12 + 2 * 12, "12 tensors on 2 copies: gradients of 2 updates, and weights"


def test_names_with_torch_are_lazy() -> None:
    code = (
        "import sys, meshwright; meshwright.Parallel; assert 'torch' not in sys.modules\n"
        "meshwright.verify; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        meshwright.nothing  # noqa: B018


OWN = """
from torch import nn
from meshwright.train.models.small_models import mlp_batch

def build():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

class Wild(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        Wild.calls += 1
        return self.linear(x) * Wild.calls

def wild():
    return [Wild(), Wild()]

def batch(step):
    return mlp_batch(step)

number = 3
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The verb, run where the user's module is."""
    return runner.meshwright("verify", *arguments, cwd=folder, env={"COLUMNS": "100"})


def test_the_verb_on_an_own_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = command(tmp_path, "own:build", "--batch-function", "own:batch", "--steps", "2", "--recompute", "1,0")
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout and "certificate: certificate.json" in done.stdout
    assert json.loads((tmp_path / "certificate.json").read_text())["passed"]


def test_the_verb_says_no(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = command(tmp_path, "own:wild", "--batch-function", "own:batch", "--steps", "2", "--json", "-o", "no.json")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "no.json").read_text())
    assert not json.loads(done.stdout)["passed"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope"], "there is no model 'nope'"),
        (["mlp", "--batch-function", "own:batch"], "mlp has its own data"),
        (["own:build"], "own:build needs data"),
        (["own:nothing", "--batch-function", "own:batch"], "cannot import own:nothing"),
        (["own:number", "--batch-function", "own:batch"], "own:number is not a function but int"),
        (["mlp", "--width", "a,b"], "--width takes numbers"),
        (["mlp", "--schedule", "chimera", "--microbatches", "5"], "chimera runs whole units"),
    ],
)
def test_the_verb_refuses(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = command(tmp_path, *arguments)
    assert done.returncode == 2 and text in done.stderr, done.stderr
    assert not (tmp_path / "certificate.json").exists()
