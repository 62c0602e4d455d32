"""A plan of a model profiles the rows that it considers, so that no time is extrapolated to more rows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshwright as mw
from meshwright.capture.cut.dry_walk import DryLayer, WalkOptions, dry_walk
from meshwright.train.auto import auto_plan
from meshwright.train.profiling import profile_model as profiling
from meshwright.train.profiling.profile_rows import rows_to_profile
from meshwright.train.profiling.timed_layers import LayerTimer
from tests.support.command import app
from tests.train.test_profile_model import BATCH, GPU, HERE, blank


@pytest.mark.parametrize(
    ("cluster", "batch", "rows", "expected"),
    [
        (GPU, 1024, None, (1, 2, 4, 8, 16, 32, 64, 128)),
        (GPU, 12, None, (1, 2, 4, 8)),
        (GPU, 1024, 48, (1, 2, 4, 8, 16, 32, 48)),
        (GPU, None, 300, (1, 2, 4, 8, 16, 32, 64, 128, 300)),
        (GPU, None, None, (1, 2, 4)),
        (HERE, 1024, None, (1, 2, 4, 8)),
        (HERE, 1024, 64, (1, 2, 4, 8, 64)),
        (HERE, 1, None, (1, 2)),
    ],
)
def test_the_rows_of_a_plan(cluster: mw.Cluster, batch: int | None, rows: int | None, expected: tuple[int, ...]) -> None:
    assert rows_to_profile(cluster, batch=batch, rows=rows) == expected


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The rows that are profiled, of estimates with two blocks."""
    found: list[tuple[int, ...]] = []
    plain = profiling.profile_model

    def note(*given: Any, rows: tuple[int, ...], **more: Any) -> mw.Profile:
        found.append(rows)
        return plain(*given, rows=rows, **more)

    monkeypatch.setattr(profiling, "profile_model", note)
    monkeypatch.setattr(auto_plan, "profile_model", note)
    return found


def test_plan_and_auto_profile_these_rows(profiled: list[tuple[int, ...]]) -> None:
    flags = ["--cluster", "dgx-a100", "--length", "16", "--no-tensor", "--schedule", "onef1b", "--json", "--no-explain"]
    done = CliRunner().invoke(app, ["plan", "gpt-tiny", "--batch", "64", "--rows", "32", *flags])
    assert done.exit_code == 0 and profiled == [(1, 2, 4, 8, 16, 32)] and "extrapolated" not in done.stdout
    auto_plan.plan_text(auto_plan.AutoRequest(blank(blocks=1), BATCH, 16), GPU)
    assert profiled[1:] == [(1, 2, 4, 8, 16)]


def test_estimates_of_many_rows_cost_two_walks_and_grow_as_the_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int | None] = []

    def note(line: Any, places: Any, model: Any, options: WalkOptions) -> list[DryLayer]:
        walked.append(options.rows)
        return dry_walk(line, places, model, options)

    monkeypatch.setattr(profiling, "dry_walk", note)
    found = mw.profile_model(blank(blocks=1), BATCH, rows=(1, 2, 4, 1 << 20), cluster=GPU, precision="fp32")
    assert walked == [1, 1 << 20]
    for layer in found.layers:
        assert layer.forward_s[-1] >= layer.flops * 2**20 / 17e12 * (1 - 1e-9)


def test_rows_that_do_not_fit_into_memory_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = LayerTimer.timed

    def small(self: LayerTimer, number: int, dry: Any, columns: Any) -> Any:
        if len(columns["tokens"]) > 2:
            raise torch.OutOfMemoryError
        return plain(self, number, dry, columns)

    monkeypatch.setattr(LayerTimer, "timed", small)
    with caplog.at_level(logging.WARNING):
        found = mw.profile_model(blank(blocks=1), BATCH, rows=(1, 2, 4, 8), repeats=1)
    assert found.rows == (1, 2) and {len(layer.forward_s) for layer in found.layers} == {2}
    assert "a layer with 4 rows does not fit into memory: the profile ends at 2 rows" in caplog.text
    with pytest.raises(mw.MeshwrightError, match="a layer with 4 rows does not fit into the memory of core") as caught:
        mw.profile_model(blank(blocks=1), BATCH, rows=(4,), repeats=1)
    assert caught.value.fix == "--rows 2, or a smaller --length"
