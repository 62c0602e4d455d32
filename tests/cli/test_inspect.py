"""`meshwright inspect` as users type it: presets, configurations, own modules, files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import meshwright

CONFIG = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": True,
}


def test_a_configuration_is_cut_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = meshwright("inspect", "config.json", "--stages", "3", "--json", "-o", "layers.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert len(found["stages"]) == 3
    for stage in found["stages"]:
        assert stage["parameters"] > 0 and stage["flops"] > 0 and stage["layers"] and stage["why"]
        for value in stage["boundary"]:
            assert set(value) == {"name", "shape", "bytes"}
    assert found["ties"] == [{"name": "shared.weight", "layers": found["ties"][0]["layers"], "stages": [0, 1, 2]}]
    assert found["heaviest_over_best"] <= 1.1
    again = meshwright("inspect", "layers.json", "--stages", "3", "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == found


def test_one_row_is_reported_as_one() -> None:
    one, two = (
        json.loads(meshwright("inspect", "gpt-tiny", "--json", "--length", "10", "--rows", rows).stdout)["stages"]
        for rows in "12"
    )
    assert one[0]["boundary"][0]["shape"] == [1, 10, 48] and two[0]["boundary"][0]["shape"] == [2, 10, 48]
    for a, b in zip(one, two, strict=True):
        assert (
            2 * a["flops"] == pytest.approx(b["flops"], rel=1e-3)
            and a["parameters"] == b["parameters"]
            and a["layers"] == b["layers"]
        )
        assert b["saved_bytes"] / 2 <= a["saved_bytes"] < 0.7 * b["saved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("gpt-tiny", "--length", "65"), "gpt-tiny takes 64 tokens per row, not 65"),
        (("gpt-tiny", "--check", "--length", "65"), "gpt-tiny takes 64 tokens per row, not 65"),
        (("vit-small", "--length", "9"), "vit-small takes pictures"),
        (
            ("tests.support.captured_models:LongSkip", "--batch-function", "tests.support.captured_models:tokens", "--rows", "3"),
            "decides the number of rows",
        ),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(arguments: tuple[str, ...], what: str) -> None:
    done = meshwright("inspect", *arguments)
    assert done.returncode == 2 and what in done.stderr, done.stderr


def test_a_model_without_positions_takes_any_length_and_a_file_takes_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = meshwright("inspect", "config.json", "--length", "80", "--json", "-o", "layers.json", cwd=tmp_path)
    assert done.returncode == 0 and [2, 80, 16] in [v["shape"] for v in json.loads(done.stdout)["stages"][0]["boundary"]]
    done = meshwright("inspect", "layers.json", "--rows", "3", cwd=tmp_path)
    assert done.returncode == 2 and "layers for one batch size" in done.stderr


def test_an_own_module_by_name() -> None:
    done = meshwright(
        "inspect",
        "tests.support.captured_models:LongSkip",
        "--batch-function",
        "tests.support.captured_models:tokens",
        "--cut",
        "layers.5",
    )
    assert done.returncode == 0, done.stderr
    assert "tokens" not in done.stderr
    assert "carrying 1 skip over it" in done.stdout and "tied: first.weight on stages 0, 1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("no-such",), "there is no model 'no-such'"),
        (("tests.support.captured_models:LongSkip",), "needs an example of its data"),
        (
            (
                "tests.support.captured_models:LongSkip",
                "--batch-function",
                "tests.support.captured_models:tokens",
                "--stages",
                "99",
            ),
            "10 layers and cannot be cut into 99",
        ),
        (
            (
                "tests.support.captured_models:LongSkip",
                "--batch-function",
                "tests.support.captured_models:tokens",
                "--cut",
                "nowhere",
            ),
            "begins with the module 'nowhere'",
        ),
        (
            ("tests.support.captured_models:LongSkip", "--batch-function", "tests.support.captured_models:only_tokens"),
            "the model needs 2: tokens, labels",
        ),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(arguments: tuple[str, ...], what: str) -> None:
    done = meshwright("inspect", *arguments)
    assert done.returncode == 2 and what in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_check_compares_the_layers_with_the_model() -> None:
    done = meshwright("inspect", "gpt-tiny", "--check")
    assert done.returncode == 0 and "check: captured layers equal the model in 6 runs" in done.stdout, done.stderr
    own = ("--batch-function", "tests.support.hard_models:features_of_step", "--check")
    done = meshwright("inspect", "tests.support.hard_models:Base", *own, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["check"]["equal"], done.stderr
    done = meshwright("inspect", "tests.support.hard_models:Counting", *own)
    assert done.returncode == 3 and "not equal: Counting.n changes with every forward" in done.stdout, done.stderr
