"""How processes of one host find each other without a common parent: Unix sockets in the abstract name space.

Such a name is no file: it ends with the process that holds it, so a crash leaves nothing behind. The sockets carry open
files from one process to another (pipes, memory), and are closed when that is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Collection, Sequence
from hashlib import sha256

from meshwright.errors import MeshwrightError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_PAUSE_S = 0.005
_BACKLOG = 128

_log = logging.getLogger(__name__)


def meet(run_id: str, rank: int, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
    """A connected socket for each peer; the higher rank calls, the lower one listens."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(_address(run_id, rank))
        door.listen(len(peers) + _BACKLOG)
        # Calls do not wait for the other side to answer the door, so any order of ranks is free of deadlock.
        for peer in sorted(p for p in peers if p < rank):
            found[peer] = _call(run_id, rank, peer, deadline, timeout_s)
        while missing := set(peers) - set(found):
            caller, visitor = _answer(door, deadline, rank, missing, timeout_s)
            found[caller] = visitor
    return found


def give(line: socket.socket, text: str, files: Sequence[int]) -> None:
    """Hand open files to the peer, with a text that says what they are."""
    socket.send_fds(line, [text.encode()], files)


def take(line: socket.socket, text: str, count: int, peer: int) -> list[int]:
    """Receive the files that the peer gives under this text."""
    try:
        heard, files, _, _ = socket.recv_fds(line, 256, count, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        heard, files = b"nothing", []
    if heard.decode() == text and len(files) == count:
        return files
    for file in files:
        os.close(file)
    said = heard.decode() or "nothing: that process is gone"
    raise MeshwrightError(
        f"rank {peer} was to open '{text}' and gave {said}", fix="give all ranks the same channels in the same order"
    )


def _address(run_id: str, rank: int) -> str:
    """Names are seen by all users; from one of them nobody can tell the next."""
    return f"\0meshwright-{sha256(f'{run_id}-{rank}'.encode()).hexdigest()[:32]}"


def _call(run_id: str, rank: int, peer: int, deadline: float, timeout_s: float) -> socket.socket:
    strangers: set[int] = set()
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(timeout_s)
        try:
            line.connect(_address(run_id, peer))
            if (owner := _owner(line)) == os.getuid():
                line.send(str(rank).encode())
                return line
            strangers.add(owner)
        except (ConnectionError, BlockingIOError, TimeoutError):
            pass
        line.close()
        if time.monotonic() > deadline:
            raise _absent(rank, {peer}, timeout_s, strangers)
        time.sleep(_PAUSE_S)


def _answer(
    door: socket.socket, deadline: float, rank: int, missing: Collection[int], timeout_s: float
) -> tuple[int, socket.socket]:
    """The next peer at the door. Who is no process of this user is sent away before anything is read, and named."""
    strangers: set[int] = set()
    while (left := deadline - time.monotonic()) > 0:
        door.settimeout(left)
        try:
            line, _ = door.accept()
        except TimeoutError:
            break
        owner, caller = _owner(line), b""
        if owner == os.getuid():
            line.settimeout(max(deadline - time.monotonic(), 1e-3))
            with contextlib.suppress(OSError):  # it is gone, or says nothing
                caller = line.recv(16)
        elif owner not in strangers:
            strangers.add(owner)
            _log.warning("rank %d ignores a connection of user %d", rank, owner)
        if not caller.isdigit():
            line.close()
            continue
        if int(caller) not in missing:
            raise MeshwrightError(
                f"rank {int(caller)} has a channel to rank {rank}, which knows of none", fix="give all ranks the same channels"
            )
        line.settimeout(timeout_s)
        return int(caller), line
    raise _absent(rank, missing, timeout_s, strangers)


def _owner(line: socket.socket) -> int:
    """The user at the other end, as the kernel knows it: abstract names have no permissions."""
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _absent(rank: int, missing: Collection[int], timeout_s: float, strangers: Collection[int]) -> MeshwrightError:
    names = ", ".join(map(str, sorted(missing)))
    what = f"rank {rank} did not meet rank {names} within {timeout_s:g} s"
    if not strangers:
        return MeshwrightError(what, fix="see whether those processes run on this host")
    users = ", ".join(map(str, sorted(strangers)))
    return MeshwrightError(
        f"{what}, and ignored processes of user {users}, not {os.getuid()}",
        fix="start all ranks as one user, or --transport torch",
    )
