"""Export: the folder that `save_pretrained` would write, from the parts that ranks hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.capture.weights.safetensors_files import Weights
from meshwright.train.checkpoint.save_pretrained import ONE, export
from tests.conftest import Pool
from tests.support.saving import Run, made, refusal_of

PLANS: list[dict[str, Any]] = [
    {"pp": 2},
    {"pp": 4, "schedule": "chimera"},
    {"pp": 2, "dp": 2, "schedule": "interleaved"},
    {"pp": 2, "width": (2, 1)},
]


def exported(run: Run, shard_bytes: int) -> dict[str, Tensor]:
    """Train a step, write; what this rank has in memory."""
    engine = made(run)
    engine.run(run.batch, 0)
    export(engine, run.folder, shard_bytes=shard_bytes)
    held = {engine.layers.names[p]: p.detach().clone() for u in engine.units for p in engine.layers.unit(u)}
    engine.close()
    return held


def read(folder: Path) -> dict[str, Tensor]:
    if (folder / ONE).exists():
        return load_file(folder / ONE)
    index = json.loads((folder / f"{ONE}.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        part = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in part)
        found |= part
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    return found


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.get("schedule", "onef1b"))
def test_one_file_or_shards_hold_the_model_once(pool: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    run = Run(plan, str(tmp_path), 1)
    for shard_bytes in (1 << 30, 20_000, 1 << 30):
        ranks = pool.run(exported, run, shard_bytes, ranks=run.parallel.processes)
        wanted = {name: t for held in ranks for name, t in held.items()}
        found = read(tmp_path)
        assert {name: t.tolist() for name, t in Weights.at(tmp_path).items()} == {n: t.tolist() for n, t in found.items()}
        assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
        files = sorted(path.name for path in tmp_path.iterdir())
        if shard_bytes > 1 << 20:
            assert files == [ONE], "what an earlier export has left is gone"
            continue
        assert len(files) > 3 and ONE not in files
        for file in files[:-1]:
            part = load_file(tmp_path / file)
            assert len(part) == 1 or sum(t.numel() * t.element_size() for t in part.values()) <= shard_bytes
            assert any(set(part) <= set(held) for held in ranks), "a shard comes from one rank's own part"


def no_room(run: Run) -> None:
    exported(run, 0)


def nowhere(run: Run) -> None:
    exported(run, 1 << 30)


def test_refusals(pool: Pool, tmp_path: Path) -> None:
    assert "cannot hold anything" in refusal_of(pool, no_room, Run({"pp": 2}, str(tmp_path), 1))
    (tmp_path / "file").write_text("")
    assert "file" in refusal_of(pool, nowhere, Run({"pp": 2}, str(tmp_path / "file" / "in"), 1))
