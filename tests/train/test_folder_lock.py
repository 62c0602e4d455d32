"""One run at a time writes to a folder: a living holder refuses others, one that is gone is taken over, readers need no lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import MeshwrightError
from meshwright.train.checkpoint import folder_lock
from meshwright.train.checkpoint.folder_lock import NAME, Holder
from tests.conftest import Pool
from tests.support.saving import Run, refusal, run_on
from tests.support.trainers import gpt2, ours, text

HOLDS = """
import sys, time
from meshwright.train.checkpoint import folder_lock
folder_lock.take(sys.argv[1])
print("held", flush=True)
time.sleep(99)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_living_holder_refuses_and_a_dead_one_does_not(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=f"another run writes to {tmp_path}: process {holder.pid} on this host"):
        folder_lock.take(tmp_path)
    folder_lock.release(tmp_path)
    assert (tmp_path / NAME).exists(), "nobody releases what another holds"
    holder.kill()
    while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    folder_lock.take(tmp_path)  # a zombie writes nothing any more
    folder_lock.take(tmp_path)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    folder_lock.release(tmp_path)
    assert not list(tmp_path.iterdir())


def test_whose_lock_is_stale(tmp_path: Path) -> None:
    me = Holder.me()
    parent = replace(me, pid=os.getppid(), born=folder_lock._born(os.getppid()))
    path = tmp_path / NAME
    for gone in (replace(parent, born=parent.born + 1), replace(parent, boot="earlier"), replace(me, pid=2**22 + 5, born=7)):
        path.write_text(json.dumps(asdict(gone)))
        folder_lock.take(tmp_path)
        assert json.loads(path.read_text()) == asdict(me), gone
    for living, words in (
        (parent, "on this host\n  try: use another output_dir, or wait"),
        (
            replace(me, host="n17", boot="other"),
            f"on the host n17\n  try: use another output_dir, or, if that run has ended, remove {path}",
        ),
        (replace(parent, space="pid:[1]"), "on this host"),
    ):
        path.write_text(json.dumps(asdict(living)))
        with pytest.raises(MeshwrightError) as raised:
            folder_lock.take(tmp_path)
        assert words in str(raised.value)
    for broken in (b"", b"{}", b"\xff", b"[" * 9000, b"9" * 5000, json.dumps({**asdict(me), "pid": True}).encode()):
        path.write_bytes(broken)
        with pytest.raises(MeshwrightError, match="does not tell which run writes"):
            folder_lock.take(tmp_path)


def test_a_trainer_is_refused_and_may_evaluate(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    trainer = ours(gpt2(), tmp_path, text(8), max_steps=1, eval_dataset=text(8))
    with pytest.raises(MeshwrightError, match="another run writes to"):
        trainer.train()
    assert "eval_loss" in trainer.evaluate()
    holder.kill()
    holder.wait()
    trainer.train()
    assert not (tmp_path / NAME).exists()


def test_own_loops_share_the_rule(pool: Pool, holder: subprocess.Popen[str], tmp_path: Path) -> None:
    """Refused on all ranks when they save; what the other run is writing is left alone."""
    begun = tmp_path / "checkpoint-9.tmp-ab"
    begun.mkdir()
    run_on(pool, Run({"pp": 2}, str(tmp_path), 1, resume=True))
    assert "another run writes to" in refusal(pool, Run({"pp": 2}, str(tmp_path), 1, saves=(1,)))
    assert begun.is_dir()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    run_on(pool, Run({"pp": 2}, str(tmp_path), 1, saves=(1,)))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


JOB = 'schema = 1\nmodel = "gpt-tiny"\n[parallel]\npp = 2\n[arguments]\nmax_steps = 1\nreport_to = "none"\noutput_dir = "{}"\n'


@pytest.mark.slow
def test_under_torchrun_the_first_rank_says_it_for_all(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(tmp_path))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshwright.cli.main", "train", job]
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert found.returncode and found.stderr.count(f"another run writes to {tmp_path}: process {holder.pid}") == 1
