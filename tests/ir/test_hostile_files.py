"""Files that were made to hurt: each is refused with a MeshwrightError, at once, by every reader of plans, jobs and models."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshwright import MeshwrightError, Parallel
from meshwright.capture.weights.safetensors_files import Weights
from meshwright.ir.imported_function import function
from meshwright.ir.plan.plan_file import asked, read_plan
from meshwright.train.checkpoint.checkpoint_facts import read_facts
from meshwright.train.job_file import read_job
from meshwright.train.models.model_names import model_file
from tests.support.fuzzing import FACTS

QUICK_S = 2.0

INTEGER, DEEP, LONG_KEY = "9" * 5000, 50_000, 50_000
TOML_VALUES = {
    "digits": INTEGER,
    "digits in hex": "0x" + "f" * 5000,
    "digits in a list": f"[1, 0x{'f' * 90_000}]",
    "nested lists": "[" * DEEP + "]" * DEEP,
    "nested tables": "{a=" * DEEP + "1" + "}" * DEEP,
    "some lists": "[" * 300 + "]" * 300,
    "NUL": "'\0'",
    "escaped NUL": '"\\u0000"',
    "lone surrogate": '"\\ud800"',
    "dotted keys": f"{{{'a.' * LONG_KEY}a = 1}}",
}
JSON_VALUES = {
    "digits": INTEGER,
    "digits in a list": f"[1, {INTEGER}]",
    "digits that can be read": "9" * 4000,
    "nested lists": "[" * DEEP + "]" * DEEP,
    "nested tables": '{"a":' * DEEP + "1" + "}" * DEEP,
    "some lists": "[" * 300 + "]" * 300,
    "NUL": '"\\u0000"',
    "lone surrogate": '"\\ud800"',
}
TOML_FILES = {
    "dotted key": "a." * LONG_KEY + "a = 1",
    "dotted key with spaces": "a . " * LONG_KEY + "a = 1",
    "dotted key with quotes": '"a".' * LONG_KEY + "a = 1",
    "dotted table": "[" + "a." * LONG_KEY + "a]",
    "NUL": "\0",
    "many open texts": '"""' * 30_000,
    "many quotes": "'" * 100_001,
    "many escapes": '"""' + '\\"""' * 30_000,
    "many escapes in a line": '"' + '\\"' * 50_000,
    "many backslashes": 'a = "' + "\\" * 100_000,
}
PLAN = "schema = 1\n[parallel]\npp = 2\n[parallel.options]\nx = 1\n[parallel.options.y]\nz = {}\n"
JOB = 'schema = 1\nmodel = "gpt-tiny"\n[arguments]\nlearning_rate = {}\n'
MODEL = 'schema = 1\nhead = "GPT2LMHeadModel"\n[config]\nmodel_type = "gpt2"\nx = {}\n'
READ: dict[str, tuple[Callable[[Path], Any], str]] = {
    "plan": (read_plan, PLAN),
    "job": (read_job, JOB),
    "model": (lambda path: model_file(str(path)), MODEL),
}


def refused(read: Callable[[Any], Any], given: Any) -> str:
    begun = time.perf_counter()
    with pytest.raises(MeshwrightError) as raised:
        read(given)
    assert time.perf_counter() - begun < QUICK_S
    said = str(raised.value)
    assert len(said) < 3000 and said.encode("utf-8", errors="strict"), "a text that any terminal takes"
    return said


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("value", TOML_VALUES)
def test_a_hostile_value_in_toml(kind: str, value: str, tmp_path: Path) -> None:
    read, form = READ[kind]
    path = tmp_path / "file.toml"
    path.write_text(form.format("0.5"))
    read(path)
    path.write_text(form.format(TOML_VALUES[value]))
    refused(read, path)


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("name", TOML_FILES)
def test_a_hostile_toml(kind: str, name: str, tmp_path: Path) -> None:
    read, form = READ[kind]
    path = tmp_path / "file.toml"
    path.write_text(form.format("0.5") + TOML_FILES[name])
    refused(read, path)


@pytest.mark.parametrize("value", JSON_VALUES)
def test_a_hostile_value_in_json(value: str, tmp_path: Path) -> None:
    text = JSON_VALUES[value]
    plan = f'{{"schema": 1, "parallel": {{"pp": 2, "options": {{"x": {text}}}}}}}'
    path = tmp_path / "plan.json"
    path.write_text(plan)
    refused(read_plan, path)
    refused(asked, plan)
    path = tmp_path / "config.json"
    path.write_text(f'{{"model_type": "gpt2", "x": {text}}}')
    refused(lambda found: model_file(str(found)), path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(f'{{"weight_map": {{"a": {text}}}}}')
    refused(Weights.at, path)


def test_no_file_is_read_without_end() -> None:
    zero = Path("/dev/zero")
    if not zero.exists():
        pytest.skip("this machine has no /dev/zero")
    assert "characters" in refused(read_plan, zero)


def test_what_no_file_could_hold_is_refused_in_python_too() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for given in ({"options": {"x": deep}}, {"pp": deep}, {"schedule": deep}, {"width": [deep]}, {"pp": 10**5000}):
        refused(Parallel.of, given)


@pytest.mark.parametrize("name", [".:x", "..a:x", "a." * 50_000 + "a:x", "a\0b:x", "\ud800:x", ":x", "os:\ud800", "os:"])
def test_a_function_that_cannot_be_named(name: str) -> None:
    with pytest.raises(MeshwrightError, match=r"cannot import|is not a function"):
        function(name)


def test_code_in_a_job_file_is_announced_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    path.write_text('schema = 1\nmodel = "mine.models:build"\ndataset = "mine.data:rows"\n')
    with caplog.at_level(logging.WARNING):
        read_job(path)
        assert [r.getMessage() for r in caplog.records] == [
            f"{path} names mine.models:build and mine.data:rows: training imports and runs this code with your rights"
        ]
        caplog.clear()
        monkeypatch.setenv("RANK", "1")
        read_job(path)
        monkeypatch.delenv("RANK")
        path.write_text('schema = 1\nmodel = "gpt-tiny"\ndataset = "stdlib"\n')
        read_job(path)
    assert not caplog.records, "another rank says it, and presets run none"


def test_an_index_that_names_a_tensor_which_its_file_has_not(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}')
    weights = Weights.at(path)
    assert weights["a"].tolist() == [1, 1]
    for read in (weights.read, weights.shape):
        assert "has no tensor 'b'" in refused(read, "b")


GOOD_FACTS: dict[str, Any] = json.loads(FACTS)


@pytest.mark.parametrize("key", GOOD_FACTS)
def test_facts_of_a_checkpoint_that_somebody_changed(key: str, tmp_path: Path) -> None:
    """The marker's sums find damage; what was written wrong and marked as whole is found here, before anything changes."""
    path = tmp_path / "state.json"
    path.write_bytes(FACTS)
    assert read_facts(tmp_path) == GOOD_FACTS
    if key not in ("unread", "scheduler"):
        path.write_text(json.dumps({name: value for name, value in GOOD_FACTS.items() if name != key}))
        assert f"'{key}' of" in refused(read_facts, tmp_path)
    if key != "scheduler":
        path.write_text(json.dumps({**GOOD_FACTS, key: [[7]]}))
        assert f"'{key}' of" in refused(read_facts, tmp_path)
    for groups in (1, -1, "0", None):
        path.write_text(json.dumps({**GOOD_FACTS, "options": {"a": groups}}))
        assert "groups that do not exist" in refused(read_facts, tmp_path)
    path.write_text(json.dumps({**GOOD_FACTS, "schema": 99}))
    assert "this version reads up to" in refused(read_facts, tmp_path)
