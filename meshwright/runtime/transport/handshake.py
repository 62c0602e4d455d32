"""Connect processes of one host that have no common parent, through Unix sockets in the abstract namespace.

Such a socket has no file. Its name is freed when the process ends, so a crash leaves nothing to clean up. The sockets carry open
files (pipes, memory) from one process to another and are closed afterwards.
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
from meshwright.runtime.started_ranks import started

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_PAUSE_S = 0.005
_BACKLOG = 128

_log = logging.getLogger(__name__)


def meet(run_id: str, rank: int, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
    """Returns a connected socket for each peer. The higher rank connects, the lower one listens."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(run_id, rank))
        listener.listen(len(peers) + _BACKLOG)
        # A connect does not wait for the accept of the other side, so no order of ranks can deadlock.
        for peer in sorted(p for p in peers if p < rank):
            found[peer] = _call(run_id, rank, peer, deadline, timeout_s)
        while missing := set(peers) - set(found):
            caller, connection = _answer(listener, deadline, rank, missing, timeout_s)
            found[caller] = connection
    return found


def give(line: socket.socket, text: str, files: Sequence[int]) -> None:
    """Sends open files to the peer, with a text that describes them."""
    socket.send_fds(line, [text.encode()], files)


def take(line: socket.socket, text: str, count: int, peer: int) -> list[int]:
    """Receives the files that the peer sends with this text."""
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
        f"rank {started(peer)} should have opened '{text}' but sent {said}",
        fix="give all ranks the same channels in the same order",
    )


def _address(run_id: str, rank: int) -> str:
    """Returns the socket name of a rank. All users can see it, so it is a hash that does not reveal the names of other ranks."""
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
    listener: socket.socket, deadline: float, rank: int, missing: Collection[int], timeout_s: float
) -> tuple[int, socket.socket]:
    """Accepts the next peer. Connections of other users are closed before anything is read, and logged."""
    strangers: set[int] = set()
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            line, _ = listener.accept()
        except TimeoutError:
            break
        owner, caller = _owner(line), b""
        if owner == os.getuid():
            line.settimeout(max(deadline - time.monotonic(), 1e-3))
            with contextlib.suppress(OSError):  # it is gone, or sends nothing
                caller = line.recv(16)
        elif owner not in strangers:
            strangers.add(owner)
            _log.warning("rank %d ignores a connection of user %d", rank, owner)
        if not caller.isdigit():
            line.close()
            continue
        if int(caller) not in missing:
            raise MeshwrightError(
                f"rank {started(int(caller))} has a channel to rank {started(rank)}, which has none to it",
                fix="give all ranks the same channels",
            )
        line.settimeout(timeout_s)
        return int(caller), line
    raise _absent(rank, missing, timeout_s, strangers)


def _owner(line: socket.socket) -> int:
    """Returns the user at the other end, as the kernel reports it, because abstract names have no permissions."""
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _absent(rank: int, missing: Collection[int], timeout_s: float, strangers: Collection[int]) -> MeshwrightError:
    names = ", ".join(map(str, map(started, sorted(missing))))
    what = f"rank {started(rank)} could not connect to rank {names} within {timeout_s:g} s"
    if not strangers:
        return MeshwrightError(what, fix="check whether those processes run on this host")
    users = ", ".join(map(str, sorted(strangers)))
    return MeshwrightError(
        f"{what}, and ignored processes of user {users}, not {os.getuid()}",
        fix="start all ranks as one user, or use --transport torch",
    )
