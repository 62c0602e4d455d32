"""`meshwright cluster`, and presets wherever a cluster is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright import MeshwrightError, read_cluster
from meshwright.ir.files.cluster_file import preset_names, preset_text
from tests.support.command import app


def said(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_the_list() -> None:
    found = json.loads(said("cluster", "--json"))
    assert [each["name"] for each in found] == preset_names()
    assert all(each["devices"] >= 4 and each["kinds"][0]["flops_per_s"]["fp32"] > 0 for each in found)
    text = said("cluster")
    assert all(f"{name}: " in text for name in preset_names()) and "cluster discover" in text


def test_one_of_them(tmp_path: Path) -> None:
    assert said("cluster", "show", "8xdgx-a100").startswith(
        "8xdgx-a100: 64 devices on 8 hosts\n  64 x a100: 80 GB, bf16 250 TFLOPS"
    )
    assert json.loads(said("cluster", "show", "laptop", "--json"))["devices"] == 4
    assert said("cluster", "show", "laptop", "--toml") == preset_text("laptop")
    file = tmp_path / "mine.toml"
    said("cluster", "show", "2xa100-v100-ethernet", "--toml", "-o", str(file))
    assert read_cluster(file) == read_cluster("2xa100-v100-ethernet")
    mixed = said("cluster", "show", str(file))
    assert "inside a host of 4 a100: 80 GB/s" in mixed and "inside a host of 4 v100: 22 GB/s" in mixed
    matrix = tmp_path / "m.json"
    matrix.write_text('{"bytes_per_s": [[0, 5e9], [2e9, 0]]}')
    assert "matrix of links: 2 GB/s to 5 GB/s" in said("cluster", "show", str(matrix))


def test_presets_in_other_verbs(tmp_path: Path) -> None:
    """The same as the file of the preset."""
    file = tmp_path / "laptop.toml"
    file.write_text(preset_text("laptop"))
    by_name, by_file = (said("simulate", "onef1b", "--cluster", name, "--json") for name in ("laptop", str(file)))
    assert by_name == by_file != said("simulate", "onef1b", "--json")
    with pytest.raises(MeshwrightError, match="did you mean laptop"):
        said("simulate", "onef1b", "--cluster", "labtop")


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="cannot write"):
        said("cluster", "discover", "-o", str(tmp_path / "none" / "c.toml"))
