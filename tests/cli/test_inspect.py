"""`meshwright inspect` as users type it: presets, configurations, own modules, files, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright import MeshwrightError
from tests.support.command import app, meshwright
from tests.tensor.test_shard_fallback import Distances, Odd

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


def test_memory_of_stages() -> None:
    """Gradients are as large as parameters, AdamW keeps two numbers for each, and saved bytes are those of one row."""
    found = json.loads(CliRunner().invoke(app, ["inspect", "gpt-tiny", "--json", "--length", "8", "--rows", "4"]).stdout)
    for stage in found["stages"]:
        memory = stage["memory"]
        assert memory["parameter_bytes"] == memory["gradient_bytes"] == memory["optimizer_bytes"] / 2 == 4 * stage["parameters"]
        assert memory["saved_bytes_per_row"] == stage["saved_bytes"] / 4
    shown = CliRunner().invoke(app, ["inspect", "gpt-tiny", "--length", "8", "--optimizer", "sgd"]).stdout
    assert all(column in shown for column in ("bytes: weights", "gradients", "optimizer", "saved of a row"))
    wrong = CliRunner().invoke(app, ["inspect", "gpt-tiny", "--optimizer", "lion"])
    assert isinstance(wrong.exception, MeshwrightError) and "no optimizer 'lion'" in str(wrong.exception)


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


def shard(*flags: str, model: str = "gpt-tiny") -> Any:
    done = CliRunner().invoke(app, ["inspect", model, "--json", *flags])
    assert done.exit_code == 0, done.exception
    return json.loads(done.output)["tensor"]


def test_a_tensor_mode_lists_products_copies_words_and_bytes() -> None:
    found = shard("--tensor-mode", "box", "--box", "2,2,1", "--rows", "4", "--length", "32")
    assert (found["mode"], found["grid"], found["save"]) == ("box", {"w": 2, "a": 2, "b": 1}, "shards")
    roles = {each["module"]: (each["role"], each["cut"]) for each in found["products"]}
    assert len(roles) == 4 * 4 + 2, "four products in each of four layers, the table and the head"
    assert roles["transformer.h.0.attn.c_attn"] == ("expand", "[48, 3*48:a>w]")
    assert roles["transformer.h.3.mlp.c_proj"] == ("contract", "[192:a, 48:w]")
    assert roles["transformer.wte"] == ("table", "[256:a>w, 48]")
    copies = {each["name"]: each for each in found["replicated"]}
    assert copies["transformer.ln_f.weight"]["copies"] == 4 and copies["transformer.h.0.attn.c_attn.bias"]["copies"] == 2
    reason = "not cut by w, a where aten.layer_norm.default in transformer.ln_f reads it"
    assert copies["transformer.ln_f.weight"]["reason"] == reason
    assert found["moves"] == [] and set(found["words"]) == {"forward", "backward", "sync"}
    assert found["words"]["backward"] > found["words"]["forward"] > found["words"]["sync"] > 0
    assert found["weight_bytes"] == 4 * found["weight_words"] and found["saved_bytes"] > 0


def test_gathered_operands_are_sent_less_and_hold_more() -> None:
    kept, again = (shard("--box", "2,2,1", "--rows", "4", "--save", save) for save in ("gathered", "shards"))
    assert kept["words"]["forward"] == again["words"]["forward"] and kept["words"]["backward"] < again["words"]["backward"]
    assert kept["saved_bytes"] > again["saved_bytes"] and kept["weight_bytes"] == again["weight_bytes"]


def test_a_replicated_module_says_what_runs_whole() -> None:
    found = shard("--tp", "2", "--replicate", "transformer.h.1.mlp")
    reasons = {each["name"]: each["reason"] for each in found["replicated"]}
    assert reasons["transformer.h.1.mlp.c_fc.weight"] == "aten.addmm.default runs whole on every rank", reasons
    products = [each["module"] for each in found["products"]]
    assert "transformer.h.1.mlp.c_fc" not in products and "transformer.h.2.mlp.c_fc" in products


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (("--tp", "5"), "transformer.h.0.attn.c_attn.weight: size 144 does not divide by 5 (p=5)", "size 145"),
        (("--box", "3,1,1"), "the rows of a microbatch: size 2 does not divide by 3 (w=3)", "size 3"),
        (
            ("--tp", "2", "--replicate", "nowhere"),
            "replicate names 'nowhere', which is not a module of the captured model",
            "leave it out",
        ),
    ],
)
def test_a_model_that_a_mode_cannot_run_is_refused(flags: tuple[str, ...], what: str, fix: str) -> None:
    done = CliRunner().invoke(app, ["inspect", "gpt-tiny", *flags])
    assert isinstance(done.exception, MeshwrightError) and what in done.exception.what and fix in (done.exception.fix or "")


def test_an_operation_without_a_rule_is_refused_by_name() -> None:
    words = ("inspect", "tests.cli.test_inspect:clusters", "--batch-function", "tests.cli.test_inspect:rows", "--box", "2,1,2")
    done = meshwright(*words)
    assert done.returncode == 2, done.stdout
    assert re.search(r"no rule of a tensor mode for aten\.cdist\S* in strange", done.stderr), done.stderr
    assert "try: replicate=['strange']" in done.stderr
    assert meshwright(*words, "--replicate", "strange").returncode == 0


def clusters() -> torch.nn.Module:
    return Odd(Distances())


def rows(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(8, 6, dtype=torch.long)
    return {"tokens": tokens, "labels": tokens}
