"""What another user of the same host can do to a run: nothing. The attacks are made by a process of the user `nobody`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.transport.handshake import _address, meet
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Doing, Failure, FailureKind
from tests.support import crew
from tests.support.other_user import stranger

MEMORY = Path("/dev/shm")


class Heavy:
    """Takes two seconds to unpack."""

    def __reduce__(self) -> tuple[object, ...]:
        return time.sleep, (2,)


def slowly(given: torch.Tensor, _: object = None) -> torch.Tensor:
    """Leaves time between taking and giving back."""
    time.sleep(1.0)
    return given + 1


def planted(victim: Path) -> None:
    """Take every name that a run has had in the memory for files, with links to what is not the stranger's."""
    seen: set[str] = getattr(planted, "seen", set())
    seen |= {name for name in os.listdir(MEMORY) if name.startswith("meshwright-")}
    planted.seen = seen  # type: ignore[attr-defined]
    for name in seen:
        with contextlib.suppress(OSError):
            for rank in ("0", "1"):
                os.makedirs(MEMORY / name / rank)
                os.chmod(MEMORY / name, 0o777)
                os.chmod(MEMORY / name / rank, 0o777)
                os.symlink(victim, MEMORY / name / rank / "0")


ATTACKED = """
import os, sys, torch
from pathlib import Path
from meshwright.runtime.launch.workers import Workers
from tests.support.other_user import stranger
from tests.runtime.test_host_attacks import planted, slowly
if __name__ == "__main__":
    with stranger(planted, Path(sys.argv[1])), Workers(2) as workers:
        found = workers.run(slowly, torch.zeros(1 << 18))
    print([float(part.sum()) for part in found], os.listdir("/dev/shm"))
"""


def test_no_stranger_can_redirect_what_a_run_writes(tmp_path: Path) -> None:
    """In a /dev/shm of its own, so that no other run of this machine is attacked."""
    script, victim = tmp_path / "script.py", tmp_path / "victim"
    script.write_text(ATTACKED)
    victim.write_text("mine")
    for part in (tmp_path, *tmp_path.parents):
        if part.stat().st_uid == os.getuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o011)  # the stranger may name the file, and not write to it
    inside = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "
    if os.getuid() or not shutil.which("unshare") or subprocess.run(["unshare", "-m", "sh", "-c", f"{inside} true"]).returncode:
        pytest.skip("only root can act as another user, and mount a /dev/shm to do so")
    found = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{inside} "$@"', "sh", sys.executable, script, victim],
        env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert victim.read_text() == "mine"
    assert found.stdout == f"{[float(1 << 18)] * 2} []\n", found.stderr[-3000:]


KILLED = """
import os, sys, time, torch
from meshwright.runtime.launch.workers import Workers
from tests.runtime.test_host_attacks import Heavy, slowly
if __name__ == "__main__":
    with Workers(2) as workers:
        print(os.getpid(), flush=True)
        while True:
            workers.run(slowly, torch.zeros(1 << 20), Heavy())
"""


def test_a_killed_run_leaves_nothing_in_memory(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    before = set(os.listdir(MEMORY))
    run = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert run.stdout is not None and run.stdout.readline()
    time.sleep(1.0)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(run.pid, 0)
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGKILL)
        pytest.fail("workers outlive their parent")
    assert not [name for name in set(os.listdir(MEMORY)) - before if name.startswith("meshwright-")]


def listening(port: int) -> set[str]:
    """The addresses on which this host listens at a port, as the kernel writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            found |= {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    return found


LOOPBACK = {"0100007F", "0" * 24 + "01000000"}


def own_ports() -> list[int]:
    """The ports on which this process listens."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")}
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            ports += [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return ports


def test_a_local_run_listens_on_the_loopback_interface_alone() -> None:
    with Workers(2) as workers:
        assert workers.store is not None
        assert listening(workers.store.port) <= LOOPBACK
        for ports in workers.run(own_ports):
            assert all(listening(port) <= LOOPBACK for port in ports), "gloo as well"


GARBAGE = ["", "{}", "\0", "[" * 9000, "9" * 5000, '{"rank": 0}', "f" * 64 + "{}"]


def forged(job: str) -> dict[str, str]:
    """Entries as another run would write them, without the secret of this one."""
    failure = Failure(0, FailureKind.DIED, "made up").to_json()
    return {f"{job}/watch/failure": failure, f"{job}/watch/doing/1": Doing(1, home="here", pid=1).to_json()}


def garbled(port: int, state: dict[str, object]) -> None:
    """Write to all keys of the board of a run, from a connection of its own."""
    if "store" not in state:
        state["store"] = TCPStore("127.0.0.1", port, is_master=False)
    store: Any = state.pop("store")  # kept only if it worked: after an error the next attack connects anew
    for text in GARBAGE:
        for rank in range(2):
            store.set(f"job1/watch/doing/{rank}", text)
        store.set("job1/watch/failure", text)
    for key, text in forged("job1").items():
        store.set(key, text)
    state["store"] = store


def test_garbage_in_the_store_does_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    with Workers(2) as workers:
        assert workers.store is not None
        port = workers.store.port
        with stranger(garbled, port, {}):
            found = workers.run(slowly, torch.zeros(3))
        assert [part.tolist() for part in found] == [[1.0] * 3] * 2
    assert "ignored an unexpected entry under 'failure'" in caplog.text


def test_a_board_takes_only_entries_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    mine, theirs, trusting = Board(store, 2, secret=b"a"), Board(store, 2, secret=b"b"), Board(store, 2)
    for text in GARBAGE:
        for board in (mine, trusting):
            store.set("failure", text)
            store.set("doing/0", text)
            assert board.failure() is None and board.heard(0) is None and board.everyone() == [None, None]
    assert len([r for r in caplog.records if "'failure'" in r.getMessage()]) == 2, "each board says it once"
    theirs.say(Doing(0, action="0F0"))
    assert mine.heard(0) is None and theirs.heard(0) == Doing(0, action="0F0")
    store.set("doing/1", store.get("doing/0").decode())
    assert theirs.heard(1) is None, "an entry of another rank"
    store.set("failure", "garbage")
    first = Failure(1, FailureKind.RAISED, "it")
    assert mine.post(first) == first and mine.post(Failure(0, FailureKind.DIED, "later")) == first == mine.failure()
    for odd in (Doing(0).to_json().replace('"pid": 0', '"pid": "0"'), Doing(7).to_json(), Doing(0).to_json()[:-1]):
        store.set("doing/0", odd)
        assert trusting.heard(0) is None
    store.set("failure", Failure(5, FailureKind.DIED, "there is no such rank").to_json())
    assert trusting.failure() is None


def knocked(run_id: str, state: dict[str, object]) -> None:
    """Connect to the doors of this run, which /proc/net/unix shows to all, and say something."""
    for name in (_address(run_id, 0), _address(run_id, 1)):
        with contextlib.suppress(OSError):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.settimeout(0.1)
            line.connect(name)
            state.setdefault(name, line)  # stays open
            line.send(b"0")
            line.send(b"\xff\0")


def late(rank: int, run_id: str) -> str:
    """Rank 1 comes late, so that others are at the door before it."""
    if rank == 1:
        time.sleep(1.0)
    lines = meet(run_id, rank, {1 - rank}, 10.0)
    return f"met {sorted(lines)}"


def test_strangers_at_the_door_are_ignored() -> None:
    run_id = f"{os.getpid()}-{time.monotonic_ns()}"
    with stranger(knocked, run_id, {}):
        assert crew.run(late, 2, run_id, deadline_s=60) == ["met [1]", "met [0]"]


def silent(rank: int, run_id: str) -> str:
    meet(run_id, rank, {1 - rank}, 1.0) if rank == 0 else time.sleep(2.0)
    return "fine"


def test_the_names_of_doors_do_not_tell_each_other() -> None:
    """Who sees the door of one rank cannot take that of the next."""
    one, other = _address("run", 0), _address("run", 1)
    assert one != other and "run" not in one and one[:-1] != other[:-1]
    run_id = f"{os.getpid()}-{time.monotonic_ns()}"
    with stranger(knocked, run_id, {}):
        said = crew.run(silent, 2, run_id, deadline_s=30)[0]
    assert "rank 0 could not connect to rank 1 within 1 s, and ignored processes of user 65534" in said
