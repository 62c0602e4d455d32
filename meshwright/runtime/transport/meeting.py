"""How processes of one host find each other without a common parent: Unix sockets in the abstract name space.

Such a name is no file: it ends with the process that holds it, so a crash leaves nothing behind. The sockets carry open
files from one process to another (pipes, memory), and are closed when that is done.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Collection, Sequence

from meshwright.errors import MeshwrightError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_PAUSE_S = 0.005


def meet(run_id: str, rank: int, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
    """A connected socket for each peer; the higher rank calls, the lower one listens."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(_address(run_id, rank))
        door.listen(len(peers) + 1)
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
    return f"\0meshwright-{run_id}-{rank}"


def _call(run_id: str, rank: int, peer: int, deadline: float, timeout_s: float) -> socket.socket:
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.connect(_address(run_id, peer))
            _check_owner(line, peer)
            line.settimeout(timeout_s)
            line.send(str(rank).encode())
            return line
        except (ConnectionError, BlockingIOError):
            line.close()
        if time.monotonic() > deadline:
            raise _absent(rank, {peer}, timeout_s)
        time.sleep(_PAUSE_S)


def _answer(
    door: socket.socket, deadline: float, rank: int, missing: Collection[int], timeout_s: float
) -> tuple[int, socket.socket]:
    door.settimeout(max(deadline - time.monotonic(), 1e-3))
    try:
        line, _ = door.accept()
        line.settimeout(timeout_s)
        caller = int(line.recv(16) or -1)
    except TimeoutError:
        raise _absent(rank, missing, timeout_s) from None
    _check_owner(line, caller)
    if caller not in missing:
        raise MeshwrightError(
            f"rank {caller} has a channel to rank {rank}, which knows of none", fix="give all ranks the same channels"
        )
    return caller, line


def _check_owner(line: socket.socket, peer: int) -> None:
    """Abstract names have no permissions: refuse a process of another user."""
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.getuid():
        line.close()
        raise MeshwrightError(
            f"rank {peer} runs as user {uid}, not {os.getuid()}", fix="start all ranks as one user, or --transport torch"
        )


def _absent(rank: int, missing: Collection[int], timeout_s: float) -> MeshwrightError:
    names = ", ".join(map(str, sorted(missing)))
    return MeshwrightError(
        f"rank {rank} did not meet rank {names} within {timeout_s:g} s", fix="see whether those processes run on this host"
    )
