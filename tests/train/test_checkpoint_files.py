"""Folders of checkpoints: what is damaged is refused by its name, what does not fit is refused on all ranks, old ones go."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import MeshwrightError
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.models.small_models import gpt
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool
from tests.support.saving import Run, adamw, made, refusal, run_on


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on(pool, Run({"pp": 2}, str(folder), 2, saves=(1, 2), optimizer=adamw))
    return folder


def copied(saved: Path, folder: Path) -> Path:
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    return folder


def test_a_damaged_file_is_refused_with_its_name_and_passed_over(pool: Pool, saved: Path, tmp_path: Path) -> None:
    names = [path.name for path in sorted((saved / "checkpoint-2").iterdir()) if path.name != rotate.MARKER]
    assert len(names) == 6, "facts, weights and optimizer of two ranks, and an index of the weights"
    for index, name in enumerate(names):
        for wound in ("cut", "flip", "remove"):
            folder = copied(saved, tmp_path / f"{index}{wound}")
            path = folder / "checkpoint-2" / name
            content = bytearray(path.read_bytes())
            if wound == "cut":
                path.write_bytes(content[:-1])
            elif wound == "flip":
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
            else:
                path.unlink()
            (line,) = rotate.damage(folder / "checkpoint-2")
            assert name in line
            assert rotate.last_good(folder) == folder / "checkpoint-1"
    assert rotate.last_good(saved) == saved / "checkpoint-2"
    run = Run({"pp": 2}, str(tmp_path), 3, resume=str(tmp_path / "1flip" / "checkpoint-2"), optimizer=adamw)
    assert "has changed since it was written" in refusal(pool, run) and ".safetensors" in refusal(pool, run)
    found = run_on(pool, Run({"pp": 2}, str(tmp_path / "2cut"), 2, resume=True, optimizer=adamw))
    assert found.first == 1


def test_a_folder_without_its_marker_is_never_resumed(pool: Pool, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    (folder / "checkpoint-2" / rotate.MARKER).unlink()
    assert rotate.last_good(folder) == folder / "checkpoint-1"
    with pytest.raises(MeshwrightError, match="never finished"):
        rotate.read_marker(folder / "checkpoint-2")
    named = Run({"pp": 2}, str(folder), 3, resume=str(folder / "checkpoint-2"), optimizer=adamw)
    assert "never finished" in refusal(pool, named)
    with pytest.raises(MeshwrightError, match="does not exist"):
        rotate.read_marker(folder / "checkpoint-7")
    marker = folder / "checkpoint-1" / rotate.MARKER
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps(content | {"schema": 99}))
    with pytest.raises(MeshwrightError, match="schema 99"):
        rotate.read_marker(folder / "checkpoint-1")
    for broken in ("", "[]", "{", '{"schema": 1}', "7"):
        marker.write_text(broken)
        with pytest.raises(MeshwrightError, match="cannot be read"):
            rotate.read_marker(folder / "checkpoint-1")
    with pytest.raises(MeshwrightError, match=r"(?s)checkpoint-2: .*never finished.*checkpoint-1: .*cannot be read"):
        rotate.last_good(folder)
    assert "checkpoint-1: " in (said := refusal(pool, Run({"pp": 2}, str(folder), 3, resume=True, optimizer=adamw)))
    assert "checkpoint-2: " in said, "every one of them with its reason"


MARKERS = [
    b'{"schema": 0, "step": 1, "files": {}}',
    b'{"schema": "1", "step": 1, "files": {}}',
    b'{"schema": true, "step": 1, "files": {}}',
    b'{"schema": 1, "stes": 1, "files": {}}',
    b'{"schema": 1, "step": "1", "files": {}}',
    b'{"schema": 1, "step": 1, "files": []}',
    b'{"schema": 1, "step": 1, "files": {"file": 3}}',
    b'{"schema": 1, "step": 1, "files": {"file": {"bytes": 3}}}',
    b'{"schema": 1, "step": 1, "files": {"file": {"bytes": "3", "sha256": ""}}}',
    b'{"schema": 1, "step": 1, "files": {"../x": {"bytes": 3, "sha256": ""}}}',
    b'{"schema": 1, "step": 1, "files": {"..": {"bytes": 3, "sha256": ""}}}',
    b'{"schema": 1, "step": 1, "files": {"\\u0000": {"bytes": 3, "sha256": ""}}}',
    b'{"schema": 1, "step": 1, "files": {"\\ud800": {"bytes": 3, "sha256": ""}}}',
    b"9" * 5000,
    b"[" * 100_000,
    b"\xff\x00",
]


@pytest.mark.parametrize("marker", MARKERS, ids=lambda marker: repr(marker[-30:]))
def test_a_marker_that_was_not_written_so_is_refused(marker: bytes, tmp_path: Path) -> None:
    good, bad = fake(tmp_path, "checkpoint-1"), fake(tmp_path, "checkpoint-2")
    (bad / rotate.MARKER).write_bytes(marker)
    with pytest.raises(MeshwrightError, match=rotate.MARKER):
        rotate.read_marker(bad)
    assert rotate.last_good(tmp_path) == good


def test_no_flipped_bit_of_a_marker_stops_a_resume(tmp_path: Path) -> None:
    good, bad = fake(tmp_path, "checkpoint-1"), fake(tmp_path, "checkpoint-2")
    content = (bad / rotate.MARKER).read_bytes()
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (bad / rotate.MARKER).write_bytes(flipped)
        assert rotate.last_good(tmp_path) in (good, bad), bit


def test_a_damaged_marker_is_passed_over_by_all_ranks(pool: Pool, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    marker = folder / "checkpoint-2" / rotate.MARKER
    marker.write_text(marker.read_text().replace('"bytes"', '"bytds"', 1))
    assert run_on(pool, Run({"pp": 2}, str(folder), 2, resume=True, optimizer=adamw)).first == 1


def plain_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"build": partial(gpt, blocks=6, width=16)}, "the checkpoint has no"),
        ({"build": partial(gpt, blocks=2, width=16)}, "the model has no|the checkpoint has no"),
        ({"build": partial(gpt, blocks=4, width=32)}, r"in the checkpoint and"),
        ({"build": partial(gpt, blocks=4, width=16, tied=False)}, "the checkpoint has no"),
        ({"optimizer": momentum}, "trained with AdamW, but the optimizer now is SGD"),
        ({"optimizer": plain_adamw}, "are in one group of the optimizer, but were trained with weight_decay"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(pool: Pool, saved: Path, change: dict[str, Any], words: str) -> None:
    assert re.search(words, refusal(pool, Run({"pp": 2}, str(saved), 3, resume=True, **{"optimizer": adamw, **change})))


# -- rotation and names


def test_only_the_newest_are_left(pool: Pool, tmp_path: Path) -> None:
    run_on(pool, Run({"pp": 2}, str(tmp_path), 4, saves=(1, 2, 3, 4), limit=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    run_on(pool, Run({"pp": 2}, str(tmp_path), 4, resume=str(tmp_path / "checkpoint-3"), saves=(4,), limit=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4"], "the same step may be saved again"
    assert "leaves none" in refusal(pool, Run({"pp": 2}, str(tmp_path), 4, limit=0))


def fake(root: Path, name: str, *, marked: bool = True) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "file").write_text(name)
    if marked:
        files = {"file": rotate.describe(folder / "file")}
        rotate.write(folder / rotate.MARKER, {"schema": rotate.SCHEMA, "step": 0, "files": files})
    return folder


def test_rotation_spares_what_is_to_be_kept_and_tidying_brings_back_names(tmp_path: Path) -> None:
    paths = [fake(tmp_path, f"checkpoint-{step}") for step in (1, 2, 3, 10)]
    rotate.rotate(tmp_path, 2, keep=[paths[0]])
    assert [p.name for p in rotate.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-10"]
    fake(tmp_path, "checkpoint-11.tmp-ab")
    fake(tmp_path, "checkpoint-12.old-ab")
    fake(tmp_path, "checkpoint-10.old-ab")
    fake(tmp_path, "checkpoint-13.old-ab")
    fake(tmp_path, "checkpoint-13", marked=False)
    fake(tmp_path, "checkpoint-14", marked=False)
    mine = fake(tmp_path, "checkpoint-best", marked=False)
    names = ["checkpoint-1", "checkpoint-10", "checkpoint-12.old-ab", "checkpoint-13.old-ab"]
    assert [p.name for p in rotate.checkpoints(tmp_path)] == names
    rotate.tidy(tmp_path)
    assert [p.name for p in rotate.checkpoints(tmp_path)] == [n.removesuffix(".old-ab") for n in names]
    assert mine.is_dir() and (tmp_path / "checkpoint-14").is_dir(), "what is not ours stays"
    assert not [p for p in tmp_path.iterdir() if ".tmp-" in p.name or ".old-" in p.name]
    assert rotate.last_good(tmp_path / "nothing") is None
    with pytest.raises(MeshwrightError, match="not have the name of a checkpoint"):
        rotate.step_of(mine)


def refused(run: Run, what: str) -> str:
    engine = made(run)
    checkpoints = Checkpoints(Path(run.folder), engine)
    try:
        if what == "json":
            checkpoints.save(1, data={"at": torch.zeros(3)})
        else:
            engine.executor.at = engine.program.instructions[0]
            checkpoints.save(1)
    except MeshwrightError as error:
        return str(error)
    finally:
        checkpoints.close()
        engine.close()
    return ""


def test_refusals(pool: Pool, tmp_path: Path) -> None:
    assert "data cannot be saved as JSON" in pool.run(refused, Run({"pp": 1}, str(tmp_path), 1), "json", ranks=1)[0]
    assert "during a step" in pool.run(refused, Run({"pp": 1}, str(tmp_path), 1), "inside", ranks=1)[0]
