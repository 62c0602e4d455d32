"""Local workers under every kind of parent, and torchrun on one host and on two."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SUPPORT

pytest.importorskip("torch", reason="needs torch")

from meshwright.errors import MeshwrightError
from meshwright.runtime.launch.worker_main import LEFT, serve
from meshwright.runtime.launch.workers import Workers, attach
from meshwright.runtime.watchdog.watchdog import Timeouts
from tests.support import trouble

LIMIT_S = 120
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SCRIPT = str(SUPPORT / "under_torchrun.py")


def alive(pid: int) -> bool:
    """Whether any thread still runs. The last one closes the pipes: the first can be a zombie before that."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended while it was read
        return Path(f"/proc/{pid}").exists()
    return any(stat.rpartition(")")[2].split()[0] not in "ZX" for stat in stats)


def gone(pids: list[int], limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def python(*args: str, text: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, input=text, env=ENV, timeout=LIMIT_S, cwd=cwd)


def test_workers_end_with_their_parent_and_leave_nothing(tmp_path: Path) -> None:
    code = "from meshwright.runtime.launch.workers import Workers\nfrom tests.support import trouble\n"
    code += f"Workers(3).run(trouble.waits_with_pid, {str(tmp_path)!r})"
    before = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen([sys.executable, "-c", code], env=ENV)
    deadline = time.monotonic() + LIMIT_S
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # into the collective
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 3 and all(map(alive, pids))
    parent.kill()
    parent.wait()
    assert gone(pids), "a worker outlived its parent"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if any(str(p) in name for p in (*pids, parent.pid))]


@pytest.mark.slow
def test_a_worker_that_still_connects_ends_with_its_parent() -> None:
    """A listener that never answers: torch tries again for most of a minute, whoever has ended meanwhile."""
    context = multiprocessing.get_context("forkserver")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mine, theirs = context.Pipe()
        worker = context.Process(target=serve, args=(theirs, 0, silent.getsockname()[1], b"", Timeouts(), {}), daemon=True)
        worker.start()
        theirs.close()
        silent.settimeout(LIMIT_S)
        silent.accept()
        mine.close()
        worker.join(timeout=10)
        assert worker.exitcode == LEFT


def test_a_pool_that_is_closed_leaves_no_process() -> None:
    with Workers(2) as pool:
        pids = pool.run(trouble.pid)
        os.kill(pids[0], signal.SIGKILL)
        assert gone(pids[:1])
        fresh = pool.run(trouble.pid)
        assert not set(fresh) & set(pids), "a worker that died between runs is replaced"
    assert gone(pids + fresh)


def test_errors_of_a_pool_say_what_to_do() -> None:
    with Workers(1) as pool:
        with pytest.raises(MeshwrightError, match="there are 1 local workers, but 2 are needed"):
            pool.run(trouble.pid, ranks=2)
        with pytest.raises(MeshwrightError, match="this job cannot be sent to workers"):
            pool.run(lambda: None)
        with pytest.raises(MeshwrightError, match="the result of a worker cannot be sent"):
            pool.run(trouble.unsendable)
        with pytest.raises(MeshwrightError, match="a local worker cannot start local workers"):
            pool.run(trouble.nested)
        assert len(pool.run(trouble.pid)) == 1


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from meshwright.runtime.launch.workers import Workers\nfrom tests.support.trouble import pid\nWorkers(2).run(pid)\n"
    )
    done = python(str(script))
    assert done.returncode == 1
    assert "unguarded.py starts workers when it is imported" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.slow
def test_workers_from_standard_input() -> None:
    lines = [
        "from meshwright.runtime.launch.workers import Workers",
        "from meshwright.errors import MeshwrightError",
        "from tests.support import trouble",
        "def mine(): pass",
        "w = Workers(2)",
        "print(len(w.run(trouble.pid)))",
        "try: w.run(mine)",
        "except MeshwrightError as error: print(error)",
        "w.close()",
    ]
    done = python("-", text="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2\na worker cannot find the function to run")


def torchrun(*args: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *args]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def under_torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    return python(*torchrun("--standalone", "--nproc-per-node", "2", SCRIPT, *args)[1:])


def test_torchrun_trains_on_both_transports() -> None:
    done = under_torchrun("nothing", "forward", "shared,torch")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rank 1 of 2")]
    shared, wire = eval(line.partition(": ")[2])
    assert shared == wire and len(shared) == 2


@pytest.mark.slow
def test_two_agents_are_two_hosts() -> None:
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            torchrun(
                "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
                "--master-port", port, SCRIPT, "nothing", "forward", "torch",
            ),
            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        printed = [node.communicate(timeout=LIMIT_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert "rank 0 of 2" in printed[0][0] and "rank 1 of 2" in printed[1][0]


def test_a_rank_that_is_killed_under_torchrun() -> None:
    done = under_torchrun("killed", "forward", "torch")
    assert done.returncode != 0
    assert "rank 1 died" in done.stderr and "waits for rank 1 (" in done.stderr, done.stderr  # for its act or its grad
    assert "lost rank" not in done.stderr, "nobody innocent complains"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", "rank 1 failed in 1F2 (stage 1): ValueError: bad weights"),
        ("sleeps", "rank 1 hangs in 1F2 (stage 1): no progress"),
        ("stopped", "rank 1 was stopped"),
        ("quits", "rank 1 failed in 1F2 (stage 1): SystemExit: 0"),
    ],
)
def test_other_trouble_under_torchrun(what: str, said: str) -> None:
    start = time.monotonic()
    done = under_torchrun(what, "forward", "shared", "3")
    assert done.returncode != 0 and time.monotonic() - start < 60
    assert said in done.stderr and "waits for rank 1" in done.stderr, done.stderr


@pytest.mark.slow
def test_one_clean_error_under_torchrun() -> None:
    done = under_torchrun("refuses", "forward", "shared")
    assert done.returncode != 0
    assert done.stderr.count("7 microbatches are one too many") <= 2, "once in the error, once in its traceback"
    assert "MeshwrightError: 7 microbatches are one too many" in done.stderr


def test_attach_outside_torchrun_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(MeshwrightError, match="RANK is not set"), attach():
        pass
