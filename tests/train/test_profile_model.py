"""Profiles of models: their layers are those of plans, bytes are exact, equal layers run once, weights one layer at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import meshwright as mw
from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.cut.dry_walk import WalkOptions, dry_walk
from meshwright.capture.cut.op_work import layer_work
from meshwright.capture.model_graph import capture, line_of
from meshwright.capture.trace.export import flatten
from meshwright.costs.roofline import ESTIMATE_ERROR, WorkKind
from meshwright.ir.profile import ProfileSource
from meshwright.train.profiling import timed_layers
from meshwright.train.profiling.timed_layers import LayerTimer
from tests.support.command import app

BATCH = {"tokens": torch.arange(24).reshape(2, 12) % 11}
GPU = mw.Cluster(devices=(mw.Device("a100", 80e9, {"bf16": 250e12, "fp32": 17e12}, 1.7e12),))
HERE = mw.Cluster(devices=(mw.Device("core", 4e9, {"fp32": 60e9}, 8e9),))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Small(nn.Module):
    """A model with tied ends, equal blocks, and a table that nothing trains."""

    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        scores = nn.functional.linear(x, self.table.weight)
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def blank(**more: Any) -> nn.Module:
    with torch.device("meta"):
        return Small(**more)


@cache
def measured(precision: str = "fp32") -> mw.Profile:
    return mw.profile_model(blank(), BATCH, rows=(1, 2, 4), repeats=1, precision=precision)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The layers that are timed."""
    found: list[int] = []
    plain = LayerTimer.timed

    def note(self: LayerTimer, number: int, *rest: Any) -> Any:
        found.append(number)
        return plain(self, number, *rest)

    monkeypatch.setattr(LayerTimer, "timed", note)
    return found


def test_the_layers_are_those_that_a_plan_numbers() -> None:
    graph, profile = capture(blank(), BATCH), measured()
    assert [layer.name for layer in profile.layers] == [layer.name for layer in graph.layers]
    assert [layer.parameter_bytes for layer in profile.layers] == [layer.parameter_bytes for layer in graph.layers]
    assert [2 * layer.flops for layer in profile.layers] == [layer.flops for layer in graph.layers]
    assert [2 * layer.output_bytes for layer in profile.layers] == [layer.output_bytes for layer in graph.layers]
    tied = [k for k, layer in enumerate(profile.layers) if layer.ties]
    assert tied == [0, len(graph.layers) - 1] and profile.layers[0].ties == ("table.weight",)
    assert (profile.rows, profile.tokens_per_row, profile.source) == ((1, 2, 4), 12, ProfileSource.MEASURED)
    assert profile.parameter_itemsize == 4.0 and profile.optimizer_bytes_per_parameter == 8.0 and profile.error >= 0
    assert all(min(layer.forward_s) > 0 and min(layer.backward_s) > 0 for layer in profile.layers)
    starts = [cut.first for cut in graph.cuts(2, at=[3]).parts]
    assert starts == [0, 3], "a cut by number is a cut of this profile"


def test_saved_bytes_of_a_microbatch_are_those_of_a_walk_with_its_rows() -> None:
    model = blank()
    line = line_of(model, flatten(model, BATCH))
    places = LayerChain(line).starts
    for precision, mixed in (("fp32", None), ("bf16", torch.bfloat16)):
        profile = measured(precision)
        for rows in (1, 3, 8):
            exact = [one.saved for one in dry_walk(line, places, model, WalkOptions(rows=rows, mixed=mixed))]
            assert profile.at(rows).saved_bytes == pytest.approx(exact, rel=1e-3)
    assert sum(layer.fixed_bytes for layer in measured("bf16").layers) > sum(layer.fixed_bytes for layer in measured().layers)


def test_the_gradient_of_a_weight_is_a_transient_whatever_the_rows() -> None:
    """The table of 11 x 16 is the largest weight of the first layer; blocks have weights of 16 x 32."""
    profile = measured()
    assert profile.layers[0].fixed_transient_bytes >= 4 * 11 * 16
    assert max(layer.fixed_transient_bytes for layer in profile.layers) >= 4 * 16 * 32


def test_bytes_do_not_depend_on_the_run() -> None:
    again = mw.profile_model(Small(), BATCH, rows=(1, 2, 4), repeats=1)
    names = (
        "output_bytes",
        "saved_bytes",
        "fixed_bytes",
        "parameter_bytes",
        "transient_bytes",
        "fixed_transient_bytes",
        "flops",
        "ties",
    )
    for a, b in zip(measured().layers, again.layers, strict=True):
        assert [getattr(a, name) for name in names] == [getattr(b, name) for name in names]


def test_equal_layers_are_timed_once(timed: list[int]) -> None:
    few = mw.profile_model(blank(blocks=3), BATCH, rows=(1, 2), repeats=1)
    of_few = len(timed)
    timed.clear()
    many = mw.profile_model(blank(blocks=7), BATCH, rows=(1, 2), repeats=1)
    assert len(timed) == of_few < 2 * len(few.layers) and len(many.layers) > len(few.layers)
    repeated = {layer.forward_s for layer in many.layers[1:-1]}
    assert len(repeated) < len(many.layers) - 2, "the times of equal layers are the same numbers"
    assert len(json.loads(mw.profile_to_json(many))["layers"]) <= len(json.loads(mw.profile_to_json(few))["layers"]) + 1


def test_only_one_layer_has_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blank()
    most: list[int] = []
    plain = timed_layers.give_weights

    def note(layer: nn.Module, device: torch.device) -> None:
        plain(layer, device)
        most.append(sum(p.numel() for p in layer.parameters() if not p.is_meta))

    monkeypatch.setattr(timed_layers, "give_weights", note)
    mw.profile_model(model, BATCH, rows=(2,), repeats=1)
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    assert 0 < max(most) < sum(p.numel() for p in model.parameters()) / 2


def test_a_real_model_is_not_changed() -> None:
    torch.manual_seed(0)
    model = Small()
    before, state = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    mw.profile_model(model, BATCH, rows=(2,), repeats=1)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), state)


def test_an_estimate_says_so_and_runs_nothing(timed: list[int]) -> None:
    profile = mw.profile_model(blank(), BATCH, rows=(1, 4), cluster=GPU, precision="bf16", optimizer="sgd")
    assert timed == [] and profile.source is ProfileSource.ESTIMATED and profile.error == ESTIMATE_ERROR
    assert (profile.device, profile.precision, profile.optimizer_bytes_per_parameter) == ("a100", "bf16", 0.0)
    for layer in profile.layers:
        assert 0 < layer.forward_s[0] <= layer.forward_s[1] <= 4 * layer.forward_s[0] * (1 + 1e-9)
    with pytest.raises(mw.MeshwrightError, match="how many operations a100 achieves in fp16"):
        mw.profile_model(blank(), BATCH, cluster=GPU, precision="fp16")


def test_the_device_of_the_cluster_decides_and_may_be_overruled(timed: list[int]) -> None:
    assert mw.profile_model(blank(blocks=1), BATCH, rows=(2,), repeats=1, cluster=HERE).source is ProfileSource.MEASURED
    assert timed and mw.profile_model(blank(blocks=1), BATCH, rows=(2,), cluster=HERE, estimate=True).device == "core"
    assert mw.profile_model(blank(blocks=1), BATCH, rows=(2,), repeats=1, cluster=GPU, estimate=False).device != "a100"


def test_work_of_a_product_is_counted_by_hand() -> None:
    """A product of 12 x 16 by 16 x 32 for each row: its operations, its tensors and its weights."""
    model = blank(blocks=1)
    line = line_of(model, flatten(model, BATCH))
    work = layer_work(line, 0, len(line.work), rows=2)
    up = next(one for one in work if one.kind is WorkKind.PRODUCT and one.weight_bytes == 4 * (16 * 32 + 32))
    assert up.flops == 2 * 12 * 16 * 32 and up.bytes == 4 * 12 * (16 + 32) and up.learns
    mixed = layer_work(line, 0, len(line.work), rows=2, mixed=True)[work.index(up)]
    assert mixed.bytes == up.bytes / 2 and mixed.weight_bytes == 2 * up.weight_bytes
    look = next(one for one in work if one.kind is WorkKind.LOOKUP)
    assert look.weight_bytes == 4 * 11 * 16 and look.bytes == 2 * (4 * 12 * 16 + 8 * 12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rows": ()}, "must increase from at least 1"),
        ({"rows": (2, 1)}, "must increase from at least 1"),
        ({"rows": (0,)}, "must increase from at least 1"),
        ({"optimizer": "lion"}, "no optimizer 'lion'"),
        ({"precision": "int3"}, "no precision 'int3'"),
        ({"repeats": 0}, "at least once"),
        ({"estimate": True}, "needs a cluster with devices"),
        ({"estimate": True, "cluster": mw.Cluster()}, "needs a cluster with devices"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=said):
        mw.profile_model(blank(), BATCH, **arguments)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_a_cluster_without_speeds_is_refused_before_the_model_is_captured(tmp_path: Path) -> None:
    matrix = tmp_path / "cluster.json"
    matrix.write_text('{"memory_bytes": [1e9, 1e9], "bytes_per_s": [[0, 1e9], [1e9, 0]]}')
    with pytest.raises(
        mw.MeshwrightError, match="does not tell how many operations device achieves in fp32; it has none"
    ) as refused:
        mw.profile_model(torch.nn.Module(), BATCH, cluster=mw.read_cluster(matrix))  # this model cannot be captured
    assert 'fp32 = "100 TFLOPS" in its table [device.device]' in str(refused.value.fix) and "--profile" in str(refused.value.fix)


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a100.toml").write_text(
        'schema = 1\n[device.a100]\nmemory = "80 GB"\nbf16 = 250e12\n[[nodes]]\ncount = 1\nper_node = 4\ndevice = "a100"\n'
        "inside = {latency_s = 5e-6, bytes_per_s = 250e9}\ncard = {latency_s = 2e-5, bytes_per_s = 25e9}\n"
    )
    flags = ("--cluster", "a100.toml", "--precision", "bf16", "--rows", "1,4", "--length", "16", "-o", "profile.json")
    done = run("profile", "gpt-tiny", *flags)
    assert done.exit_code == 0 and "times estimated for a100 in bf16, error 50%" in done.stdout
    profile = mw.profile_from_json((tmp_path / "profile.json").read_text())
    assert profile.rows == (1, 4) and profile.tokens_per_row == 16
    planned = run("plan", "--profile", "profile.json", "--cluster", "a100.toml", "--microbatches", "8", "--batch", "32", "--json")
    assert planned.exit_code == 0 and json.loads(planned.stdout)["step_s"] > 0
    for flag, value, said in (("--rows", "1,x", "takes whole numbers"), ("--rows", "4,2", "must increase")):
        wrong = run("profile", "gpt-tiny", flag, value)
        assert isinstance(wrong.exception, mw.MeshwrightError) and said in str(wrong.exception)
