"""Ensures that only one run at a time writes to a folder of checkpoints and logs. A small file holds the lock.

    take("out")        raises while another run holds it
    release("out")     by the process that took it

The file contains the host, the process and its start time. If the process has ended, the lock is taken over. This cannot be
detected on another host, so the error says what to do. Reading a folder needs no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.errors import MeshwrightError

NAME = "run.lock"


@dataclass(frozen=True)
class Holder:
    """A process: host, boot id of the host, PID namespace, PID, and start time in clock ticks."""

    host: str
    boot: str
    space: str
    pid: int
    born: int

    @classmethod
    def me(cls) -> Holder:
        """Return this process."""
        return cls(socket.gethostname(), _boot(), _space(), os.getpid(), _born(os.getpid()))

    @property
    def gone(self) -> bool:
        """True if this process has certainly ended."""
        here = Holder.me()
        if (self.host, self.space) != (here.host, here.space):
            return self.host == here.host and self.boot != here.boot  # the machine was rebooted
        return self.boot != here.boot or _born(self.pid) != self.born


def take(folder: str | Path) -> None:
    """Take the lock of a folder. Raises if another process holds it; does nothing if this process does."""
    path = Path(folder, NAME)
    with _alone(path.parent):
        refuse_held(folder)
        text = json.dumps(asdict(Holder.me()))
        if _read(path) is not None:
            _replace(path, text)  # held by this process, or by one that has ended
        elif not _create(path, text):
            refuse_held(folder)  # another host was faster


def release(folder: str | Path) -> None:
    """Release the lock of a folder if this process holds it."""
    path = Path(folder, NAME)
    with contextlib.suppress(OSError, MeshwrightError):
        if _read(path) == Holder.me():
            path.unlink()


def refuse_held(folder: str | Path) -> None:
    """Raise if another run holds the lock of a folder."""
    path = Path(folder, NAME)
    holder = _read(path)
    if holder is None or holder == Holder.me() or holder.gone:
        return
    here = holder.host == socket.gethostname()
    raise MeshwrightError(
        f"another run writes to {folder}: process {holder.pid} on {'this host' if here else f'the host {holder.host}'}",
        fix="use another output_dir" + (", or wait for it" if here else f", or, if that run has ended, remove {path}"),
    )


def held_by_another(folder: str | Path) -> bool:
    """True if another run seems to hold the lock of this folder."""
    try:
        refuse_held(folder)
    except MeshwrightError:
        return True
    return False


def _read(path: Path) -> Holder | None:
    try:
        found = json.loads(path.read_bytes()[:4096])
        kinds = {"host": str, "boot": str, "space": str, "pid": int, "born": int}
        if not isinstance(found, dict) or {key: type(value) for key, value in found.items()} != kinds:
            raise ValueError("it does not name a process")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MeshwrightError(
            f"{path} does not tell which run writes to this folder: {error}", fix=f"if no run does, remove {path}"
        ) from error
    return Holder(**found)


def _create(path: Path, text: str) -> bool:
    """Create the file with its complete text, unless it exists."""
    made = _written(path, text)
    try:
        os.link(made, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(text)
            return True
        return False
    finally:
        made.unlink()
    return True


def _replace(path: Path, text: str) -> None:
    _written(path, text).rename(path)


def _written(path: Path, text: str) -> Path:
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with made.open("x") as file:
        file.write(text)
    return made


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Allow one process of this host at a time, so that two cannot take over the same lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _space() -> str:
    """Return the PID namespace; a container has its own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _born(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; -1 if it has ended, 0 if it cannot be found out."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if found[0] == "Z" else int(found[19])
    except (OSError, ValueError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except (OSError, OverflowError):
        pass
    return 0
