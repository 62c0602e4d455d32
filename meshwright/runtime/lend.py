"""Large tensors on their way to local workers and back: written once, into memory that all of them map.

    with Lending() as lending:
        data = lending.pack(model)     a pickle without the large tensors; those are in files in memory
    pickle.loads(data)                 maps them, while the lending lasts

A mapping is private: pages that a process never reads cost it nothing, and those that it writes become its own. What does
not fit into the memory for files travels in the pickle.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

MEMORY = Path("/dev/shm")
SMALL_BYTES = 1 << 16
"""Smaller tensors travel in the pickle."""

MOST = 8192
"""So many files at most: a process may map some tens of thousands."""


class Lending:
    """A folder for the tensors of one piece of work, gone at the end; who has mapped a tensor keeps it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="meshwright-", dir=MEMORY if MEMORY.is_dir() else None))

    def __enter__(self) -> Lending:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.folder)

    def pack(self, given: Any) -> bytes:
        """A pickle that any process of this host can read."""
        return pack(given, self.folder)


def end(folder: Path) -> None:
    """Nobody else will map what is in here."""
    shutil.rmtree(folder, ignore_errors=True)


def pack(given: Any, folder: Path) -> bytes:
    """Pickle with large tensors beside it, in a folder."""
    into = io.BytesIO()
    _Lender(into, folder).dump(given)
    return into.getvalue()


class _Sheet:
    """A storage in a file; its pickle is read as the storage itself, once for all tensors on it."""

    def __init__(self, path: Path, storage: UntypedStorage) -> None:
        self.path, self.storage = path, storage  # held, so that no other gets its place

    def __reduce__(self) -> tuple[Any, ...]:
        return UntypedStorage.from_file, (str(self.path), False, self.storage.nbytes())


class _Lender(pickle.Pickler):
    def __init__(self, into: io.BytesIO, folder: Path) -> None:
        super().__init__(into, protocol=pickle.HIGHEST_PROTOCOL)
        self.folder, self.sheets = folder, dict[int, _Sheet | None]()

    def reducer_override(self, given: Any) -> Any:
        """Plain large tensors of the host are lent, also those inside parameters; all else is pickled as ever."""
        if type(given) is not Tensor or given.device.type != "cpu" or given.layout != torch.strided or given.requires_grad:
            return NotImplemented
        storage = given.untyped_storage()
        if storage.nbytes() < SMALL_BYTES or given.is_conj() or given.is_neg() or vars(given):
            return NotImplemented
        sheet = self._sheet(storage)
        if sheet is None:
            return NotImplemented
        return borrowed, (sheet, given.dtype, given.storage_offset(), tuple(given.shape), given.stride())

    def _sheet(self, storage: UntypedStorage) -> _Sheet | None:
        key = storage.data_ptr()
        if key not in self.sheets:
            self.sheets[key] = self._written(storage, self.folder / str(len(self.sheets))) if len(self.sheets) < MOST else None
        return self.sheets[key]

    def _written(self, storage: UntypedStorage, path: Path) -> _Sheet | None:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(flat.numpy().data)
        except OSError:  # no room
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return _Sheet(path, storage)


def borrowed(storage: UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor on a mapped storage."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
