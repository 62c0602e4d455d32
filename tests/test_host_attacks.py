"""What another user of the same host can do to a run: nothing. The attacks are made by a process of the user `nobody`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

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
from meshwright.runtime.launch import Workers
from tests.strangers import stranger
from tests.test_host_attacks import planted, slowly
if __name__ == "__main__":
    with stranger(lambda: planted(Path(sys.argv[1]))), Workers(2) as workers:
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
from meshwright.runtime.launch import Workers
from tests.test_host_attacks import Heavy, slowly
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
