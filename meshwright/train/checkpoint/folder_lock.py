"""Who writes to a folder of checkpoints and logs: one run at a time, noted in a small file.

    take("out")        refused while another run holds it
    release("out")     by the one who took it

The file says host, process and when that began. A lock whose process is gone is taken over; on another host nobody can see
that, so it is refused with what to do. Reading a folder needs no lock.
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
    """A process: its host, since when that is up, its name space, number and start in clock ticks."""

    host: str
    boot: str
    space: str
    pid: int
    born: int

    @classmethod
    def me(cls) -> Holder:
        """This process."""
        return cls(socket.gethostname(), _boot(), _space(), os.getpid(), _born(os.getpid()))

    @property
    def gone(self) -> bool:
        """Is it certain that this process has ended?"""
        here = Holder.me()
        if (self.host, self.space) != (here.host, here.space):
            return self.host == here.host and self.boot != here.boot  # the machine was started again
        return self.boot != here.boot or _born(self.pid) != self.born


def take(folder: str | Path) -> None:
    """Hold a folder, or say who does; one that this process holds already stays held."""
    path = Path(folder, NAME)
    with _alone(path.parent):
        refuse_held(folder)
        text = json.dumps(asdict(Holder.me()))
        if _read(path) is not None:
            _replace(path, text)  # of this process, or of one that is gone
        elif not _create(path, text):
            refuse_held(folder)  # another host was faster


def release(folder: str | Path) -> None:
    """Let go of a folder, if this process holds it."""
    path = Path(folder, NAME)
    with contextlib.suppress(OSError, MeshwrightError):
        if _read(path) == Holder.me():
            path.unlink()


def refuse_held(folder: str | Path) -> None:
    """Refuse a folder that another run holds."""
    path = Path(folder, NAME)
    holder = _read(path)
    if holder is None or holder == Holder.me() or holder.gone:
        return
    here = holder.host == socket.gethostname()
    raise MeshwrightError(
        f"another run writes to {folder}: process {holder.pid} on {'this host' if here else f'the host {holder.host}'}",
        fix="another output_dir" + (", or wait for it" if here else f", or, if that run is over, remove {path}"),
    )


def held_by_another(folder: str | Path) -> bool:
    """Does another run hold this folder, as far as one can tell?"""
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
            raise ValueError("it names no process")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MeshwrightError(
            f"{path} does not say who writes to this folder: {error}", fix=f"if no run does, remove {path}"
        ) from error
    return Holder(**found)


def _create(path: Path, text: str) -> bool:
    """Make the file with all of its text, unless it is there."""
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
    """One process of this host at a time, so that two cannot take over the same lock."""
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
    """The name space of process numbers: a container has its own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _born(pid: int) -> int:
    """When a process started, in clock ticks since the host did; -1 where it is gone, 0 where nobody can tell."""
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
