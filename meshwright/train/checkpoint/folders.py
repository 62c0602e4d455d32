"""Folders of checkpoints: names, the marker that makes one whole, what is damaged, the last good one, rotation.

    out/checkpoint-30                whole: its marker names every file with its size and digest
    out/checkpoint-40.tmp-5f2e       being written, or left by a run that was killed: never resumed
    out/checkpoint-30.old-5f2e       the one before, while another of the same step takes its name

A folder gets its name by one rename after all of it is on disk, so a kill at any moment leaves the last good one alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

SCHEMA = 2
"""The version of what stands in a checkpoint; a newer one is refused.

1: all tensors in shard-*.safetensors, weights as model/NAME and buffer/NAME. 2: weights in model-*.safetensors, as NAME,
the optimizer's tensors in optimizer-*.safetensors.
"""

MARKER, FACTS = "complete.json", "state.json"
_NAME = re.compile(r"checkpoint-(\d+)(?:\.(tmp|old)-\w+)?")
_log = logging.getLogger(__name__)


def name_of(step: int) -> str:
    """What the checkpoint behind so many steps is called."""
    return f"checkpoint-{step}"


def checkpoints(root: Path) -> list[Path]:
    """The whole ones, oldest first; one that had to give up its name counts where nothing has that name."""
    found: dict[int, Path] = {}
    for kind in ("old", None):
        found |= {step: path for step, is_, path in _folders(root) if is_ == kind and (path / MARKER).is_file()}
    return [found[step] for step in sorted(found)]


def candidates(root: Path) -> list[Path]:
    """The same, and folders of that name without a marker: what a resume looks at, and says why it passes them over."""
    found = {step: path for step, kind, path in _folders(root) if kind is None}
    found |= {step_of(path): path for path in checkpoints(root)}
    return [found[step] for step in sorted(found)]


def _folders(root: Path) -> Iterator[tuple[int, str | None, Path]]:
    """Everything here that is ours by its name: step, what it is, where."""
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if path.is_dir() and (match := _NAME.fullmatch(path.name)):
                yield int(match[1]), match[2], path


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise MeshwrightError(f"{folder} is not named as a checkpoint is", fix="a folder checkpoint-STEP")
    return int(match[1])


def digest(path: Path) -> str:
    """What a file's bytes come to."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path) -> dict[str, Any]:
    """What a marker says of a file."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def read_marker(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint; a folder without its marker was never finished."""
    path = folder / MARKER
    if not os.path.isfile(path):  # unlike Path.is_file() it takes any name
        why = "is not there" if not os.path.isdir(folder) else f"has no {MARKER}: it was never finished"
        raise MeshwrightError(f"{str(folder)[:200]} {why}", fix="resume from the last good one: resume_from_checkpoint=True")
    try:
        read = json.loads(path.read_bytes())
        return _files(read)
    except (OSError, ValueError, RecursionError) as error:
        raise MeshwrightError(f"{path} cannot be read: {error}", fix="resume from another checkpoint") from error


def _files(read: Any) -> dict[str, dict[str, Any]]:
    """The files that a marker names; whatever is not as `finish` writes it is a ValueError, or a newer schema."""
    if not isinstance(read, dict) or set(read) != {"schema", "step", "files"}:
        raise ValueError("it is no object of schema, step and files")
    if type(schema := read["schema"]) is not int or schema < 1:
        raise ValueError("its schema is no number of at least 1")
    if schema > SCHEMA:
        raise MeshwrightError(f"{MARKER} has schema {schema}, this version reads up to {SCHEMA}", fix="a newer meshwright")
    if type(read["step"]) is not int or not isinstance(files := read["files"], dict):
        raise ValueError("its step is no number, or its files are no object")
    for name, about in files.items():
        if name in ("", ".", "..") or not name.isprintable() or "/" in name:
            raise ValueError(f"{name[:80]!r} is no name of a file")
        if not isinstance(about, dict) or set(about) != {"bytes", "sha256"}:
            raise ValueError(f"bytes and sha256 of {name[:80]} are not there")
        if type(about["bytes"]) is not int or not isinstance(about["sha256"], str):
            raise ValueError(f"bytes or sha256 of {name[:80]} are not what they should be")
    return files


def damage(folder: Path, *, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, each by its name; every rank may read a share of the bytes."""
    found = []
    for index, (name, wanted) in enumerate(sorted(read_marker(folder).items())):
        path = folder / name
        try:
            if not path.is_file():
                found.append(f"{path} is missing")
            elif (size := path.stat().st_size) != wanted["bytes"]:
                found.append(f"{path} has {size} bytes, {wanted['bytes']} were written")
            elif index % shares == share and digest(path) != wanted["sha256"]:
                found.append(f"{path} does not hold what was written to it")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
    return found


def last_good(root: Path, *, folders: Sequence[Path] | None = None, judge: Callable[[Path], list[str]] = damage) -> Path | None:
    """The newest checkpoint whose files are all as they were written; damaged ones are named in the log and passed over.

    None where there is no checkpoint at all; where there are some and none is good, an error says what is wrong with each.
    Ranks that look together give the folders that they have agreed on, and a judge that they ask together.
    """
    reasons = []
    for folder in reversed(candidates(root) if folders is None else folders):
        try:
            wrong = judge(folder)
        except MeshwrightError as error:
            wrong = [error.what]
        if not wrong:
            return folder
        reasons.append(f"{folder.name}: {'; '.join(wrong)}")
        _log.warning("%s is passed over: %s", folder.name, "; ".join(wrong))
    if reasons:
        raise MeshwrightError(
            "\n  ".join([f"no checkpoint in {root} can be resumed:", *reasons]),
            fix="start anew without resume_from_checkpoint, or bring back the files from a copy",
        )
    return None


# -- changing what is there; all of this happens on one rank


def tidy(root: Path) -> None:
    """Remove what a killed run has left behind; a checkpoint that had given up its name gets it back."""
    whole = {step: path for path in checkpoints(root) for step in (step_of(path),)}
    for step, kind, path in list(_folders(root)):
        if kind == "old" and whole.get(step) == path:
            if (final := root / name_of(step)).exists():
                discard(final)
            path.rename(final)
        elif kind is not None:
            shutil.rmtree(path, ignore_errors=True)
    if root.is_dir():
        sync(root)


def finish(folder: Path, files: dict[str, dict[str, Any]], step: int) -> Path:
    """Mark a temporary folder as whole, and give it its name."""
    write(folder / MARKER, {"schema": SCHEMA, "step": step, "files": files})
    sync(folder)
    final = folder.parent / name_of(step)
    before = None
    if final.exists():
        before = folder.with_name(folder.name.replace(".tmp-", ".old-"))
        final.rename(before)
    folder.rename(final)
    sync(folder.parent)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)
    return final


def rotate(root: Path, limit: int | None, keep: Collection[Path] = ()) -> None:
    """Remove the oldest until `limit` are left; those to keep stay, and so does the newest."""
    if limit is None:
        return
    whole = checkpoints(root)
    spared = {path.name for path in keep} | {path.name for path in whole[-1:]}
    old = [path for path in whole if path.name not in spared]
    for path in old[: max(0, len(whole) - max(limit, 1))]:
        discard(path)


def discard(folder: Path) -> None:
    """Take a checkpoint's name away first, so that half of one is never seen."""
    gone = folder.with_name(f"{name_of(step_of(folder))}.tmp-{secrets.token_hex(4)}")
    folder.rename(gone)
    sync(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def write(path: Path, content: object) -> None:
    """A JSON file that is on disk when this returns."""
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """A file's bytes, or what a folder lists, are on disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
