"""Large tensors on their way to local workers and back: written once, into memory that all of them map.

    with Lending() as lending:
        data = lending.pack(model)     a pickle without the large tensors; those are in a file in memory
        send(data, lending.file)       the open file itself goes to the other process, over a Unix socket
    unpack(data, file)                 maps them; who has mapped a tensor keeps it

The file has no name: no other user can put something in its place, and it ends with the last process that holds it. A
mapping is private: pages that a process never reads cost it nothing, and those that it writes become its own. What does not
fit into memory for files travels in the pickle.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import pickle
import tempfile
import weakref
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from meshwright.errors import MeshwrightError

SMALL_BYTES = 1 << 16
"""Smaller tensors travel in the pickle."""

MOST = 8192
"""So many tensors at most: a process may map some tens of thousands."""

_FAILED = ctypes.c_void_p(-1).value


class Lending:
    """The tensors of one piece of work; `file` is None where all of them were small."""

    def __init__(self) -> None:
        self.file: int | None = None

    def __enter__(self) -> Lending:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def pack(self, given: Any, what: str = "this cannot be sent", fix: str | None = None) -> bytes:
        """Pickle, with large tensors in the file; where it cannot be pickled, the error begins with `what`."""
        into = io.BytesIO()
        try:
            _Lender(into, self).dump(given)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            raise MeshwrightError(f"{what}: {error}", fix=fix) from error
        return into.getvalue()

    def write(self, storage: UntypedStorage) -> tuple[int, int] | None:
        """Where in the file the bytes of a storage are, and how many; None where there is no room for them."""
        try:
            if self.file is None:
                self.file = _nameless()
            begin = -(-os.fstat(self.file).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        except OSError:
            return None
        left = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
        try:
            at = begin
            while left:
                done = os.pwrite(self.file, left, at)
                at, left = at + done, left[done:]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, begin)
            return None
        return begin, storage.nbytes()


def unpack(data: bytes, file: int | None) -> Any:
    """What was packed; the file is closed, its tensors stay mapped."""
    try:
        return _Borrower(io.BytesIO(data), file).load()
    finally:
        if file is not None:
            os.close(file)


class _Sheet:
    """A storage that is lent, held so that no other gets its place."""

    def __init__(self, place: tuple[int, int], storage: UntypedStorage) -> None:
        self.place, self.storage = place, storage


class _Lender(pickle.Pickler):
    def __init__(self, into: io.BytesIO, lending: Lending) -> None:
        super().__init__(into, protocol=pickle.HIGHEST_PROTOCOL)
        self.lending, self.sheets = lending, dict[int, _Sheet | None]()

    def persistent_id(self, given: Any) -> tuple[int, int] | None:
        """A sheet is its place in the file."""
        return given.place if type(given) is _Sheet else None

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
            place = self.lending.write(storage) if len(self.sheets) < MOST else None
            self.sheets[key] = None if place is None else _Sheet(place, storage)
        return self.sheets[key]


class _Borrower(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, file: int | None) -> None:
        super().__init__(data)
        self.file, self.mapped = file, dict[tuple[int, int], UntypedStorage]()

    def persistent_load(self, place: Any) -> UntypedStorage:
        """A storage on the file, the same one for all tensors that shared it."""
        assert self.file is not None, "what was lent comes with its file"
        if place not in self.mapped:
            self.mapped[place] = _map(self.file, *place)
        return self.mapped[place]


def borrowed(storage: UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor on a mapped storage."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def _nameless() -> int:
    """A new file in memory that no path leads to."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("meshwright")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(file: int, begin: int, size: int) -> UntypedStorage:
    """A private mapping; Python's own would keep a descriptor for each."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file, begin)
    if address == _FAILED:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, size).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
