"""Weights in safetensors files, by name. Only the requested parts are read.

weights = Weights.at("checkpoint/")           a file, or a folder with one file or with an index of several
weights["transformer.wte.weight"]             reads one tensor
weights.read("lm_head.weight", slice(0, 8))   reads some rows of it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import file_text
from meshwright.ir.reader import parsed

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class Weights(Mapping[str, Tensor]):
    """Tensors by name, in one file or several. Each tensor is read on access."""

    files: dict[str, Path]
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, path: str | Path) -> Weights:
        """Open the weights of a file, of a folder, or of an index file."""
        path = Path(path)
        if os.path.isdir(path):  # Path.is_dir() raises for some names
            path = next((path / name for name in (INDEX, ONE) if (path / name).exists()), path)
        if os.path.isdir(path):
            found = sorted(path.glob("*.safetensors"))
            if not found:
                raise MeshwrightError(f"{path} has no safetensors file", fix="model.save_pretrained(folder)")
            return cls({name: file for file in found for name in _keys(file)})
        if not os.path.exists(path):
            raise MeshwrightError(f"there is no {str(path)[:200]}", fix="pass a safetensors file, or a folder with one")
        if path.suffix == ".json":
            return cls(_index(path))
        return cls(dict.fromkeys(_keys(path), path))

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, name: str, *part: slice) -> Tensor:
        """Read one tensor or a part of it, and nothing else."""
        piece = self._slice(name)
        found: Tensor = piece[part] if part else piece[:] if piece.get_shape() else self._file(name).get_tensor(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError

        file = self._file(name)
        try:
            return file.get_slice(name)
        except SafetensorError as error:
            raise MeshwrightError(
                f"{self.files[name]} has no tensor {name[:200]!r}, although the index lists it there",
                fix="use the index and the files of one save_pretrained",
            ) from error

    def _file(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path]

    def close(self) -> None:
        """Close the files."""
        self._open.clear()


def sources(
    weights: Weights, names: Mapping[str, Collection[str]], shapes: Mapping[str, tuple[int, ...]], ignore: Collection[str] = ()
) -> dict[str, str]:
    """Return for each tensor of a model the name that it is stored under: its own, or that of a tensor it is tied to.

    `names` maps the first name of each tensor to all its names. Raises for missing and unknown tensors, and for different shapes.
    """
    found = {first: next((n for n in all_ if n in weights), "") for first, all_ in names.items()}
    if missing := [first for first, stored in found.items() if not stored]:
        raise MeshwrightError(
            f"the weights lack {len(missing)} of the model's {len(names)} tensors, the first is {missing[0]!r}",
            fix=_prefix(weights, names) or "use weights of this same model, with its own names",
        )
    known = {name for all_ in names.values() for name in all_}
    unknown = [name for name in weights if name not in known and not any(fnmatch(name, pattern) for pattern in ignore)]
    if unknown:
        raise MeshwrightError(
            f"the weights have {len(unknown)} tensors that the model does not have, the first is {unknown[0]!r}",
            fix=f"ignore=[{unknown[0]!r}], with * for any part of a name",
        )
    for first, stored in found.items():
        if weights.shape(stored) != shapes[first]:
            raise MeshwrightError(
                f"{stored!r} has the shape {weights.shape(stored)} in the weights and {shapes[first]} in the model",
                fix="use the configuration that the weights were saved with",
            )
    return found


def _prefix(weights: Weights, names: Mapping[str, Collection[str]]) -> str | None:
    """Return a hint if all names differ only by a prefix."""
    some = next(iter(weights), "")
    for first in names:
        if first.endswith(f".{some}"):
            return f"the names are stored without {first[: -len(some)]!r}: load them into that part of the model"
        if some.endswith(f".{first}"):
            return f"the names are stored with the prefix {some[: -len(first)]!r}"
    return None


def _keys(path: Path) -> list[str]:
    return list(_opened(path).keys())


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MeshwrightError("safetensors is not installed", fix="pip install 'meshwright[hf]'") from error
    open_: Callable[..., Any] = safe_open
    try:
        return open_(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise MeshwrightError(f"{path} is not a safetensors file: {error}", fix="model.save_pretrained(folder)") from error


def _index(path: Path) -> dict[str, Path]:
    read = parsed(file_text(path, "the index"), f"the index {path}")
    table = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise MeshwrightError(f"{path} is not an index of safetensors files", fix='{"weight_map": {name: file}}')
    found = {name: path.parent / file for name, file in table.items()}
    if lost := sorted({str(file) for file in found.values() if not os.path.exists(file)}):  # Path.exists() raises for some names
        raise MeshwrightError(f"{path.name} names {lost[0][:200]}, which does not exist")
    return found
