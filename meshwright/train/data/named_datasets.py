"""Data sets by name: the sources of Python's standard library, scikit-learn's digits, files, and those of Hugging Face.

Text is read byte by byte, so any model with a vocabulary of at least 256 can use it. Rows with `input_ids` are used as they are.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ir.input_limits import shown

NAMES = ("stdlib", "digits")
"""The names of the built-in data sets."""

Row = dict[str, Tensor]


class Bytes(Dataset[Row]):
    """Rows of `length` bytes of files, by default the sources of the standard library. Every tenth row is for evaluation."""

    def __init__(
        self, *, length: int = 64, rows: int | None = None, evaluation: bool = False, files: Sequence[Path] = ()
    ) -> None:
        self.length, self.rows, self.evaluation, self.files = length, rows, evaluation, tuple(files)
        _refuse_length(length)

    @cached_property
    def data(self) -> Tensor:
        """All bytes."""
        files = self.files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        try:
            return _tensor(b"".join(path.read_bytes() for path in files))
        except OSError as error:
            raise MeshwrightError(f"the data set {files[0]} cannot be read: {error}") from error

    def __len__(self) -> int:
        blocks = len(self.data) // (10 * self.length)
        whole = blocks if self.evaluation else 9 * blocks
        return whole if self.rows is None else min(self.rows, whole)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)  # this also ends a loop over the rows
        block = 10 * index + 9 if self.evaluation else 10 * (index // 9) + index % 9
        tokens = self.data[block * self.length : (block + 1) * self.length].long()
        return {"input_ids": tokens, "labels": tokens.clone()}

    def __getstate__(self) -> dict[str, Any]:
        """Do not send the data: each process reads the files itself."""
        return {key: value for key, value in self.__dict__.items() if key != "data"}


class Texts(Bytes):
    """Rows of `length` bytes of texts, joined by newlines."""

    def __init__(self, texts: Iterable[str], *, length: int, evaluation: bool = False) -> None:
        super().__init__(length=length, evaluation=evaluation)
        self.data = _tensor("\n".join(texts).encode("utf-8", "replace"))

    def __getstate__(self) -> dict[str, Any]:
        """Send the texts along, because no other process has them."""
        return dict(self.__dict__)


class Tokens(Dataset[Row]):
    """Rows that are already tokens. Every tenth row is for evaluation."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, evaluation: bool = False) -> None:
        self.rows = [row for i, row in enumerate(rows) if (i % 10 == 9) == evaluation]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        tokens = torch.tensor(row["input_ids"])
        return {"input_ids": tokens, "labels": torch.tensor(row["labels"]) if "labels" in row else tokens.clone()}


class Digits(Dataset[Row]):
    """1,797 grey pictures of 8 x 8 pixels. Every tenth one is for evaluation."""

    def __init__(self, *, evaluation: bool = False) -> None:
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        except ImportError as error:
            raise MeshwrightError(
                "the digits come with scikit-learn, which is not installed", fix="pip install scikit-learn"
            ) from error
        pictures, labels = load_digits(return_X_y=True)
        chosen = torch.tensor([(i % 10 == 9) == evaluation for i in range(len(labels))])
        self.pixels = (torch.from_numpy(pictures).float() / 16).view(-1, 1, 8, 8)[chosen]
        self.labels = torch.from_numpy(labels).long()[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Row:
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


def named(name: str, *, length: int, evaluation: bool = False) -> Dataset[Row]:
    """Return a data set by name, from a file, or from Hugging Face."""
    match name:
        case "stdlib":
            return Bytes(length=length, evaluation=evaluation)
        case "digits":
            return Digits(evaluation=evaluation)
        case _ if os.path.isfile(name):
            if Path(name).suffix in (".jsonl", ".json"):
                return _of_rows(name, _json_lines(Path(name)), length=length, evaluation=evaluation)
            return _refuse_empty(name, Bytes(length=length, evaluation=evaluation, files=[Path(name)]))
        case _ if Path(name).suffix in (".txt", ".jsonl", ".json"):
            raise MeshwrightError(f"there is no file {name!r}", fix="pass the path of a text or JSONL file")
        case _:
            return _of_rows(name, _hugging_face(name), length=length, evaluation=evaluation)


def _of_rows(name: str, rows: Sequence[Mapping[str, Any]], *, length: int, evaluation: bool) -> Dataset[Row]:
    """Use rows with `input_ids` as they are, and rows with `text` as bytes."""
    if rows and all("input_ids" in row for row in rows):
        _refuse_tokens(name, rows)
        return Tokens(rows, evaluation=evaluation)
    if not rows or not all(isinstance(row.get("text"), str) for row in rows):
        found = ", ".join(map(repr, rows[0])) if rows else "no rows"
        raise MeshwrightError(f"the data set {name} has {found}", fix='use rows with "text" or with "input_ids"')
    _refuse_length(length)
    return _refuse_empty(name, Texts((row["text"] for row in rows), length=length, evaluation=evaluation))


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Read one object per line. Only newlines separate lines; texts may contain other separators."""
    found, fix = [], "use JSONL: one object per line"
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"the data set {path} cannot be read: {error}", fix=fix) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise MeshwrightError(f"line {number} of {path} is not JSON: {str(error)[:200]}", fix=fix) from error
        if not isinstance(found[-1], dict):
            raise MeshwrightError(f"line {number} of {path} is not an object", fix=fix)
    return found


def _hugging_face(name: str) -> Any:
    """Load the training split of a data set of Hugging Face: owner/name, or owner/name/configuration."""
    known = f"{', '.join(NAMES)}, a text or JSONL file, a data set of Hugging Face, or package.module:function"
    if "/" not in name and not os.path.isdir(name) and (guess := did_you_mean(name, NAMES)):
        raise MeshwrightError(
            f"there is no data set {name!r} here{guess}", fix=f"{known} (owner/name)"
        )  # before the network is used
    try:
        from datasets import load_dataset  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise MeshwrightError(
            f"there is no local data set {name!r}, and data sets of Hugging Face need the package datasets",
            fix=f"pip install datasets, or {known}",
        ) from error
    parts = [name] if os.path.isdir(name) else name.split("/", 2)
    path, configuration = "/".join(parts[:2]), parts[2] if len(parts) > 2 else None
    try:
        return load_dataset(path, configuration, split="train")
    except Exception as error:  # unknown names, no network and gated data sets each raise a different class
        raise MeshwrightError(
            f"there is no data set {name!r}{did_you_mean(name, NAMES)} ({type(error).__name__}: {str(error)[:200]})", fix=known
        ) from error


def _refuse_tokens(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    for number, row in enumerate(rows, 1):
        for column in ("input_ids", "labels"):
            tokens = row.get(column, [0])
            if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
                raise MeshwrightError(f"row {number} of {name} has {column} that are not a list of whole numbers")
            if too := [token for token in tokens if not -(2**63) <= token < 2**63]:
                raise MeshwrightError(
                    f"row {number} of {name} has {column} with {shown(too[0])}", fix="use ids of the vocabulary"
                )


def _refuse_length(length: int) -> None:
    if length < 2:
        raise MeshwrightError(f"rows of {length} bytes have nothing to predict", fix="--length 64")


def _refuse_empty(name: str, found: Bytes) -> Bytes:
    if not len(found):
        raise MeshwrightError(f"{name} has {len(found.data)} bytes, too few for ten rows of {found.length}", fix="--length 8")
    return found


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
