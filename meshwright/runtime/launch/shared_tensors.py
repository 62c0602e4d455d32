"""Send large tensors to local workers and back through shared memory: each one is written once, and every process maps it.

    with Lending() as lending:
        data = lending.pack(model)     returns a pickle without the large tensors, and writes those to a file in memory
        send(data, lending.file)       sends the open file to the other process over a Unix socket
    unpack(data, file)                 maps the tensors; a mapped tensor stays valid after the file is closed

The file has no path, so no other user can replace it. It is freed when the last process that holds it ends. Mappings are
private: a page costs memory only in processes that read it, and a process that writes to a page gets its own copy of it. A
tensor that does not fit into the file is sent inside the pickle.
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
"""Smaller tensors are sent inside the pickle."""

MOST = 8192
"""The maximum number of shared tensors. The kernel limits a process to some tens of thousands of mappings."""

_FAILED = ctypes.c_void_p(-1).value


class Lending:
    """The shared tensors of one job. `file` is None if all tensors were small."""

    def __init__(self) -> None:
        self.file: int | None = None

    def __enter__(self) -> Lending:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def pack(self, given: Any, what: str = "this cannot be sent", fix: str | None = None) -> bytes:
        """Pickles an object, and writes its large tensors to the file. `what` starts the error text if it cannot be pickled."""
        into = io.BytesIO()
        try:
            _Lender(into, self).dump(given)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            raise MeshwrightError(f"{what}: {error}", fix=fix) from error
        return into.getvalue()

    def write(self, storage: UntypedStorage) -> tuple[int, int] | None:
        """Writes a storage to the file. Returns its offset and size in bytes, or None if there is no room."""
        try:
            if self.file is None:
                self.file = _file_in_memory()
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
    """Returns the object that was packed. Closes the file; its tensors stay mapped."""
    try:
        return _Borrower(io.BytesIO(data), file).load()
    finally:
        if file is not None:
            os.close(file)


class _SharedStorage:
    """A storage in the file. It keeps the storage alive, so that its address stays unique while pickling."""

    def __init__(self, place: tuple[int, int], storage: UntypedStorage) -> None:
        self.place, self.storage = place, storage


class _Lender(pickle.Pickler):
    def __init__(self, into: io.BytesIO, lending: Lending) -> None:
        super().__init__(into, protocol=pickle.HIGHEST_PROTOCOL)
        self.lending, self.shared = lending, dict[int, _SharedStorage | None]()

    def persistent_id(self, given: Any) -> tuple[int, int] | None:
        """Replaces a shared storage by its offset and size in the file."""
        return given.place if type(given) is _SharedStorage else None

    def reducer_override(self, given: Any) -> Any:
        """Shares plain large CPU tensors, also inside parameters. Everything else is pickled as usual."""
        if type(given) is not Tensor or given.device.type != "cpu" or given.layout != torch.strided or given.requires_grad:
            return NotImplemented
        storage = given.untyped_storage()
        if storage.nbytes() < SMALL_BYTES or given.is_conj() or given.is_neg() or vars(given):
            return NotImplemented
        shared = self._share(storage)
        if shared is None:
            return NotImplemented
        return borrowed, (shared, given.dtype, given.storage_offset(), tuple(given.shape), given.stride())

    def _share(self, storage: UntypedStorage) -> _SharedStorage | None:
        key = storage.data_ptr()
        if key not in self.shared:
            place = self.lending.write(storage) if len(self.shared) < MOST else None
            self.shared[key] = None if place is None else _SharedStorage(place, storage)
        return self.shared[key]


class _Borrower(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, file: int | None) -> None:
        super().__init__(data)
        self.file, self.mapped = file, dict[tuple[int, int], UntypedStorage]()

    def persistent_load(self, place: Any) -> UntypedStorage:
        """Maps a storage of the file. Tensors that shared a storage share it again."""
        assert self.file is not None, "shared tensors are sent with their file"
        if place not in self.mapped:
            self.mapped[place] = _map(self.file, *place)
        return self.mapped[place]


def borrowed(storage: UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Returns a tensor on a mapped storage."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def _file_in_memory() -> int:
    """Creates a file in memory that has no path."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("meshwright")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(file: int, begin: int, size: int) -> UntypedStorage:
    """Creates a private mapping. Python's own `mmap` would keep a file descriptor for each one."""
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
