"""Data that every machine has: Python's own sources, byte by byte, and scikit-learn's pictures of digits."""

from __future__ import annotations

import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import MeshwrightError

NAMES = ("stdlib", "digits")
"""Data sets by name."""

Row = dict[str, Tensor]


class Bytes(Dataset[Row]):
    """Rows of `length` bytes of the standard library's sources, file by file; every tenth is left for evaluation."""

    def __init__(self, *, length: int = 64, rows: int | None = None, evaluation: bool = False) -> None:
        self.length, self.rows, self.evaluation = length, rows, evaluation
        if length < 2:
            raise MeshwrightError(f"rows of {length} bytes have nothing to predict", fix="--length 64")

    @cached_property
    def data(self) -> Tensor:
        """All bytes."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)

    def __len__(self) -> int:
        blocks = len(self.data) // (10 * self.length)
        whole = blocks if self.evaluation else 9 * blocks
        return whole if self.rows is None else min(self.rows, whole)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)  # which is also what ends a loop over the rows
        block = 10 * index + 9 if self.evaluation else 10 * (index // 9) + index % 9
        tokens = self.data[block * self.length : (block + 1) * self.length].long()
        return {"input_ids": tokens, "labels": tokens.clone()}

    def __getstate__(self) -> dict[str, Any]:
        """Each process reads the files by itself."""
        return {key: value for key, value in self.__dict__.items() if key != "data"}


class Digits(Dataset[Row]):
    """1,797 grey pictures of 8 x 8 pixels; every tenth is left for evaluation."""

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
    """A data set by name."""
    match name:
        case "stdlib":
            return Bytes(length=length, evaluation=evaluation)
        case "digits":
            return Digits(evaluation=evaluation)
        case _:
            raise MeshwrightError(f"there is no data set {name!r}", fix=f"{', '.join(NAMES)}, or package.module:function")
