"""Folders of checkpoints: names, the marker of a complete one, damage, the last good one, rotation.

    out/checkpoint-30                complete: its marker lists every file with its size and digest
    out/checkpoint-40.tmp-5f2e       being written, or left by a run that was killed: never resumed
    out/checkpoint-30.old-5f2e       the previous one, while another one of the same step takes its name

A folder gets its final name by one rename after everything is on disk. A kill at any time leaves the last good one intact.
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
"""The version of the content of a checkpoint; a newer one is refused.

1: all tensors in shard-*.safetensors, weights as model/NAME and buffer/NAME. 2: weights in model-*.safetensors, as NAME, the
optimizer's tensors in optimizer-*.safetensors.
"""

MARKER, FACTS = "complete.json", "state.json"
_NAME = re.compile(r"checkpoint-(\d+)(?:\.(tmp|old)-\w+)?")
_log = logging.getLogger(__name__)


def name_of(step: int) -> str:
    """Return the name of the checkpoint after this many steps."""
    return f"checkpoint-{step}"


def checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first. A renamed old one counts only if no folder has its original name."""
    found: dict[int, Path] = {}
    for kind in ("old", None):
        found |= {step: path for step, is_, path in _folders(root) if is_ == kind and (path / MARKER).is_file()}
    return [found[step] for step in sorted(found)]


def candidates(root: Path) -> list[Path]:
    """Also include folders with that name but without a marker: a resume skips them and logs why."""
    found = {step: path for step, kind, path in _folders(root) if kind is None}
    found |= {step_of(path): path for path in checkpoints(root)}
    return [found[step] for step in sorted(found)]


def _folders(root: Path) -> Iterator[tuple[int, str | None, Path]]:
    """Yield all folders here whose names are ours: step, kind, path."""
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if path.is_dir() and (match := _NAME.fullmatch(path.name)):
                yield int(match[1]), match[2], path


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise MeshwrightError(f"{folder} does not have the name of a checkpoint", fix="use a folder checkpoint-STEP")
    return int(match[1])


def digest(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path) -> dict[str, Any]:
    """Return what the marker stores about a file."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def read_marker(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the files of a checkpoint. A folder without a marker was never finished."""
    path = folder / MARKER
    if not os.path.isfile(path):  # Path.is_file() raises for some names
        why = "does not exist" if not os.path.isdir(folder) else f"has no {MARKER}: it was never finished"
        raise MeshwrightError(f"{str(folder)[:200]} {why}", fix="resume from the last good one: resume_from_checkpoint=True")
    try:
        read = json.loads(path.read_bytes())
        return _files(read)
    except (OSError, ValueError, RecursionError) as error:
        raise MeshwrightError(f"{path} cannot be read: {error}", fix="resume from another checkpoint") from error


def _files(read: Any) -> dict[str, dict[str, Any]]:
    """Return the files that a marker lists. Raises for a newer schema and for anything that `finish` would not write."""
    if not isinstance(read, dict) or set(read) != {"schema", "step", "files"}:
        raise ValueError("it is not an object with schema, step and files")
    if type(schema := read["schema"]) is not int or schema < 1:
        raise ValueError("its schema is not a number of at least 1")
    if schema > SCHEMA:
        raise MeshwrightError(f"{MARKER} has schema {schema}, this version reads up to {SCHEMA}", fix="update meshwright")
    if type(read["step"]) is not int or not isinstance(files := read["files"], dict):
        raise ValueError("its step is not a number, or its files are not an object")
    for name, about in files.items():
        if name in ("", ".", "..") or not name.isprintable() or "/" in name:
            raise ValueError(f"{name[:80]!r} is not a file name")
        if not isinstance(about, dict) or set(about) != {"bytes", "sha256"}:
            raise ValueError(f"bytes and sha256 of {name[:80]} are missing")
        if type(about["bytes"]) is not int or not isinstance(about["sha256"], str):
            raise ValueError(f"bytes or sha256 of {name[:80]} have the wrong type")
    return files


def damage(folder: Path, *, share: int = 0, shares: int = 1) -> list[str]:
    """Return what is wrong with the files of a checkpoint, each by name. Each rank may read a share of the bytes."""
    found = []
    for index, (name, wanted) in enumerate(sorted(read_marker(folder).items())):
        path = folder / name
        try:
            if not path.is_file():
                found.append(f"{path} is missing")
            elif (size := path.stat().st_size) != wanted["bytes"]:
                found.append(f"{path} has {size} bytes, but {wanted['bytes']} were written")
            elif index % shares == share and digest(path) != wanted["sha256"]:
                found.append(f"{path} has changed since it was written")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
    return found


def last_good(root: Path, *, folders: Sequence[Path] | None = None, judge: Callable[[Path], list[str]] = damage) -> Path | None:
    """Return the newest checkpoint whose files are all intact. Damaged ones are named in the log and skipped.

    Returns None if there is no checkpoint at all. If there are some but none is good, the error lists what is wrong with each.
    Several ranks pass the folders that they agreed on, and a judge function that they call together.
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
        _log.warning("%s is skipped: %s", folder.name, "; ".join(wrong))
    if reasons:
        raise MeshwrightError(
            "\n  ".join([f"no checkpoint in {root} can be resumed:", *reasons]),
            fix="start again without resume_from_checkpoint, or restore the files from a backup",
        )
    return None


# -- changing folders; all of this happens on one rank


def tidy(root: Path) -> None:
    """Remove what a killed run left. A checkpoint that was renamed to make room gets its name back."""
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
    """Mark a temporary folder as complete, and give it its final name."""
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
    """Remove the oldest checkpoints until `limit` are left. Those in `keep` and the newest one stay."""
    if limit is None:
        return
    whole = checkpoints(root)
    spared = {path.name for path in keep} | {path.name for path in whole[-1:]}
    old = [path for path in whole if path.name not in spared]
    for path in old[: max(0, len(whole) - max(limit, 1))]:
        discard(path)


def discard(folder: Path) -> None:
    """Rename a checkpoint before deleting it, so that a partly deleted one is never visible."""
    gone = folder.with_name(f"{name_of(step_of(folder))}.tmp-{secrets.token_hex(4)}")
    folder.rename(gone)
    sync(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def write(path: Path, content: object) -> None:
    """Write a JSON file. It is on disk when this returns."""
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
